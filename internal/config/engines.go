// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"path/filepath"
	"strings"
	"time"
)

// Docker configures the Docker source.
type Docker struct {
	// Hosts are tried in order: unix:///PATH, or tcp://HOST:PORT on loopback.
	// Empty means $DOCKER_HOST, or else the rootful and the rootless socket.
	Hosts []string
}

// Podman configures the Podman source.
type Podman struct {
	// Hosts are tried in order: unix:///PATH, or tcp://HOST:PORT on loopback.
	// Empty means root's socket.
	Hosts []string
}

// Containerd configures the containerd source.
type Containerd struct {
	Sockets    []string // absolute paths, tried in order; empty means its own and k3s's
	Namespaces []string // empty means all but Docker's
}

// Kube configures the Kubernetes source.
type Kube struct {
	// Kubeconfigs are absolute paths. Those that exist are all followed. Empty means the service
	// account in a cluster, or $KUBECONFIG, or those of k3s, kubeadm, RKE2 and k0s.
	Kubeconfigs []string
	Context     string   // of the kubeconfig; empty for its current one
	Namespaces  []string // empty means all
	Selector    string   // of labels, in Kubernetes' own syntax
}

// engineFields are the settings of the sources that query engines.
func (c *Agent) engineFields() []field {
	return []field{
		many("docker.hosts", "docker-host", "url", &c.Docker.Hosts, dockerHost, str,
			"where Docker is: unix:///PATH or tcp://127.0.0.1:PORT, tried in order (default $DOCKER_HOST, else the usual sockets)"),
		many("podman.hosts", "podman-host", "url", &c.Podman.Hosts, dockerHost, str,
			"where Podman is: unix:///PATH or tcp://127.0.0.1:PORT, tried in order (default unix:///run/podman/podman.sock)"),
		many("containerd.sockets", "containerd-socket", "path", &c.Containerd.Sockets, absolute, str,
			"where containerd is, tried in order (default its own socket, then k3s's)"),
		many("containerd.namespaces", "containerd-namespace", "name", &c.Containerd.Namespaces, namespaceName, str,
			"containerd namespaces to read (default all but Docker's)"),
		many("kube.kubeconfigs", "kubeconfig", "path", &c.Kube.Kubeconfigs, absolute, str,
			"kubeconfig files, whose clusters are all followed (default the service account in a cluster, else $KUBECONFIG, else those of k3s, kubeadm, RKE2 and k0s)"),
		one("kube.context", "kube-context", "name", &c.Kube.Context, plain, str, "context of the kubeconfig (default its current one)"),
		many("kube.namespaces", "kube-namespace", "name", &c.Kube.Namespaces, namespaceName, str, "namespaces of Services to read (default all)"),
		one("kube.selector", "kube-selector", "labels", &c.Kube.Selector, plain, str, "read only Services with these labels"),
		one("engineGrace", "engine-grace", "duration", &c.EngineGrace, duration(time.Second, 24*time.Hour, true), stringOf,
			"how long declared ports stay published after their engine stopped, 0 for ever"),
	}
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

func plain(s string) (string, error) { return s, nil }

func namespaceName(s string) (string, error) {
	if s == "" || strings.ContainsAny(s, "/ \t\n") {
		return "", fmt.Errorf("%q: want the name of a namespace", s)
	}
	return s, nil
}
