// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"path/filepath"
	"strings"
)

// Docker configures the Docker source.
type Docker struct {
	// Hosts are tried in order. Empty means $DOCKER_HOST, or else the rootful and the rootless socket.
	Hosts []string `key:"hosts" flag:"docker-host" kind:"url" is:"docker" help:"where Docker is: unix:///PATH or tcp://127.0.0.1:PORT, tried in order (default $DOCKER_HOST, else the usual sockets)"`
}

// Podman configures the Podman source.
type Podman struct {
	// Hosts are tried in order. Empty means root's socket.
	Hosts []string `key:"hosts" flag:"podman-host" kind:"url" is:"docker" help:"where Podman is: unix:///PATH or tcp://127.0.0.1:PORT, tried in order (default unix:///run/podman/podman.sock)"`
}

// Containerd configures the containerd source.
type Containerd struct {
	Sockets    []string `key:"sockets" flag:"containerd-socket" kind:"path" is:"absolute" help:"where containerd is, tried in order (default its own socket, then k3s's)"`
	Namespaces []string `key:"namespaces" flag:"containerd-namespace" kind:"name" is:"namespace" help:"containerd namespaces to read (default all but Docker's)"`
}

// Kube configures the Kubernetes source.
type Kube struct {
	// Kubeconfigs that exist are all followed.
	Kubeconfigs []string `key:"kubeconfigs" flag:"kubeconfig" kind:"path" is:"absolute" help:"kubeconfig files, whose clusters are all followed (default the service account in a cluster, else $KUBECONFIG, else those of k3s, kubeadm, RKE2 and k0s)"`
	Context     string   `key:"context" flag:"kube-context" kind:"name" help:"context of the kubeconfig (default its current one)"`
	Namespaces  []string `key:"namespaces" flag:"kube-namespace" kind:"name" is:"namespace" help:"namespaces of Services to read (default all)"`
	Selector    string   `key:"selector" flag:"kube-selector" kind:"labels" help:"read only Services with these labels"` // in Kubernetes' own syntax
}

func dockerHost(s string) (string, error) {
	scheme, rest, _ := strings.Cut(s, "://")
	if scheme == "unix" && filepath.IsAbs(rest) || scheme == "tcp" && strings.Contains(rest, ":") {
		return s, nil
	}
	return "", fmt.Errorf("%q: want unix:///PATH or tcp://127.0.0.1:PORT", s)
}

func absolute(s string) (string, error) {
	if !filepath.IsAbs(s) || strings.ContainsRune(s, 0) {
		return "", fmt.Errorf("%q: want an absolute path", s)
	}
	return s, nil
}

func namespaceName(s string) (string, error) {
	if s == "" || strings.ContainsAny(s, "/ \t\n") {
		return "", fmt.Errorf("%q: want the name of a namespace", s)
	}
	return s, nil
}
