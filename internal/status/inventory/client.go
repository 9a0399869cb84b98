// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// requestTimeout bounds each request but a watch.
const requestTimeout = 30 * time.Second

// pageSize is how many objects one page of a list has at most.
const pageSize = 250

// Client reads and writes inventories at one API server.
type Client struct {
	http      *http.Client
	inventory *rest.RESTClient
	core      *rest.RESTClient
	groups    *rest.RESTClient
}

// NewClient makes a client. It connects to nothing. The caller closes it.
func NewClient(conf *rest.Config) (*Client, error) {
	conf = rest.CopyConfig(conf)
	conf.NegotiatedSerializer = serializer.NewCodecFactory(newScheme()).WithoutConversion()
	conf.ContentType, conf.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	hc, err := rest.HTTPClientFor(conf)
	if err != nil {
		return nil, err
	}
	c := &Client{http: hc}
	for _, p := range []struct {
		to   **rest.RESTClient
		gv   schema.GroupVersion
		path string
	}{
		{&c.inventory, groupVersion, "/apis"},
		{&c.core, coreV1, "/api"},
		{&c.groups, coreV1, "/apis"},
	} {
		conf.GroupVersion, conf.APIPath = &p.gv, p.path
		if *p.to, err = rest.RESTClientForConfigAndClient(conf, hc); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// node returns the Node of that name.
func (c *Client) node(ctx context.Context, name string) (*node, error) {
	n := new(node)
	err := c.core.Get().Resource("nodes").Name(name).Timeout(requestTimeout).MaxRetries(0).Do(ctx).Into(n)
	return n, err
}

// Nodes returns the labels of each node.
func (c *Client) Nodes(ctx context.Context) (map[string]map[string]string, error) {
	nodes := make(map[string]map[string]string)
	o := metav1.ListOptions{Limit: pageSize}
	for {
		var page nodeList
		err := c.core.Get().Resource("nodes").VersionedParams(&o, metav1.ParameterCodec).Timeout(requestTimeout).MaxRetries(0).Do(ctx).Into(&page)
		if err != nil {
			return nil, explain("list", "nodes", err)
		}
		for _, n := range page.Items {
			nodes[n.Name] = n.Labels
		}
		if o.Continue = page.Continue; o.Continue == "" {
			return nodes, nil
		}
	}
}

// Get returns the object of a node.
func (c *Client) Get(ctx context.Context, name string) (*NodeInventory, error) {
	n := new(NodeInventory)
	err := c.inventory.Get().Resource(Resource).Name(name).Timeout(requestTimeout).MaxRetries(0).Do(ctx).Into(n)
	return n, err
}

// put creates the object if it has no version yet, and else replaces the version that it has.
func (c *Client) put(ctx context.Context, n *NodeInventory) (*NodeInventory, error) {
	req := c.inventory.Post().Resource(Resource)
	if n.ResourceVersion != "" {
		req = c.inventory.Put().Resource(Resource).Name(n.Name)
	}
	stored := new(NodeInventory)
	err := req.Body(n).Timeout(requestTimeout).MaxRetries(0).Do(ctx).Into(stored)
	return stored, err
}

// List returns the objects of all nodes, or of one, and the version of the list.
func (c *Client) List(ctx context.Context, node string) ([]NodeInventory, string, error) {
	o := options(node)
	o.Limit = pageSize
	var all []NodeInventory
	for {
		var page NodeInventoryList
		err := c.inventory.Get().Resource(Resource).VersionedParams(&o, metav1.ParameterCodec).Timeout(requestTimeout).MaxRetries(0).Do(ctx).Into(&page)
		if apierrors.IsResourceExpired(err) && o.Continue != "" { // changed too often between two pages
			all, o = nil, options(node)
			continue
		}
		if err != nil {
			return nil, "", c.explain(ctx, "list", err)
		}
		all = append(all, page.Items...)
		if o.Continue = page.Continue; o.Continue == "" {
			return all, page.ResourceVersion, nil
		}
	}
}

// watch follows changes from a version on.
func (c *Client) watch(ctx context.Context, node, version string) (watch.Interface, error) {
	o := options(node)
	o.ResourceVersion, o.Watch, o.AllowWatchBookmarks = version, true, true
	return c.inventory.Get().Resource(Resource).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0).Watch(ctx)
}

// options select all nodes, or one.
func options(node string) metav1.ListOptions {
	if node == "" {
		return metav1.ListOptions{}
	}
	return metav1.ListOptions{FieldSelector: "metadata.name=" + node}
}

// The kinds of failures that an operator can mend.
var (
	ErrForbidden = errors.New("RBAC does not allow it")
	ErrNoCRD     = errors.New("the API server has no such resource")
)

// explain adds to an error of the resource what is missing: a verb, the CRD, its version.
func (c *Client) explain(ctx context.Context, verb string, err error) error {
	if !apierrors.IsNotFound(err) {
		return explain(verb, Resource+"."+Group, err)
	}
	var group metav1.APIGroup
	switch found := c.groups.Get().AbsPath("/apis", Group).Timeout(requestTimeout).MaxRetries(0).Do(ctx).Into(&group); {
	case apierrors.IsNotFound(found):
		return fmt.Errorf("%w as %s.%s: apply deploy/kubernetes/crd.yaml", ErrNoCRD, Resource, Group)
	case found != nil:
		return fmt.Errorf("%w as %s.%s %s: %w", ErrNoCRD, Resource, Group, Version, err)
	}
	var served []string
	for _, v := range group.Versions {
		served = append(served, v.Version)
	}
	if slices.Contains(served, Version) {
		return err
	}
	return fmt.Errorf("%w: it serves %s.%s %s, and this fairlead knows %s", ErrNoCRD, Resource, Group, strings.Join(served, ", "), Version)
}

// explain names the verb that RBAC lacks.
func explain(verb, resource string, err error) error {
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("%w: verb %s of %s is missing: %w", ErrForbidden, verb, resource, err)
	}
	return err
}
