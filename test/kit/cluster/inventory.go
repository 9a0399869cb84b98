// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"strings"

	"github.com/goccy/go-yaml"
)

// Paths of what inventories need.
const (
	Inventories = "/apis/fairlead.dev/v1alpha1/nodeinventories"

	crds        = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	admission   = "/apis/admissionregistration.k8s.io/v1/"
	nodes       = "/api/v1/nodes"
	roles       = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
	roleBinding = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
)

// CreateCRD creates the resource that a file defines, which the server serves a moment later.
func (c *Cluster) CreateCRD(ctx context.Context, file string) error {
	return c.create(ctx, file, crds)
}

// CreateAdmission creates the policy and the binding of a file. They apply a moment later.
func (c *Cluster) CreateAdmission(ctx context.Context, file string) error {
	return c.create(ctx, file, admission+"validatingadmissionpolicies", admission+"validatingadmissionpolicybindings")
}

// create posts the documents of a file to those paths.
func (c *Cluster) create(ctx context.Context, file string, paths ...string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	for i, doc := range strings.Split(string(b), "\n---\n") {
		text, err := yaml.YAMLToJSON([]byte(doc))
		if err != nil {
			return err
		}
		var o Object
		if err := json.Unmarshal(text, &o); err != nil {
			return err
		}
		if _, err := c.Do(ctx, http.MethodPost, paths[i], o); err != nil {
			return err
		}
	}
	return nil
}

// CreateNode creates a Node whose kubelet reported that boot id.
func (c *Cluster) CreateNode(ctx context.Context, name, boot string) error {
	if _, err := c.Do(ctx, http.MethodPost, nodes, Object{"apiVersion": "v1", "kind": "Node", "metadata": Object{"name": name}}); err != nil {
		return err
	}
	_, err := c.Do(ctx, http.MethodPatch, nodes+"/"+name+"/status", Object{"status": Object{"nodeInfo": Object{
		"bootID": boot, "machineID": "", "systemUUID": "", "kernelVersion": "", "osImage": "", "containerRuntimeVersion": "",
		"kubeletVersion": "", "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64",
	}}})
	return err
}

// AllowInventory lets a user write inventories by those verbs, and get nodes. It replaces
// what it allowed before.
func (c *Cluster) AllowInventory(ctx context.Context, user string, verbs ...string) error {
	rules := []Object{
		{"apiGroups": []string{"fairlead.dev"}, "resources": []string{"nodeinventories"}, "verbs": verbs},
		{"apiGroups": []string{""}, "resources": []string{"nodes"}, "verbs": []string{"get"}},
	}
	const group, name = "rbac.authorization.k8s.io", "inventory"
	_, err := c.Do(ctx, http.MethodPatch, roles+"/"+name, Object{"rules": rules})
	if err == nil {
		return nil
	}
	if _, err := c.Do(ctx, http.MethodPost, roles, Object{
		"apiVersion": group + "/v1", "kind": "ClusterRole", "metadata": Object{"name": name}, "rules": rules,
	}); err != nil {
		return err
	}
	_, err = c.Do(ctx, http.MethodPost, roleBinding, Object{
		"apiVersion": group + "/v1", "kind": "ClusterRoleBinding", "metadata": Object{"name": name},
		"roleRef":  Object{"apiGroup": group, "kind": "ClusterRole", "name": name},
		"subjects": []Object{{"kind": "User", "name": user, "apiGroup": group}},
	})
	return err
}
