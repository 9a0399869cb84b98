// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/inventory"
	"github.com/fairlead/fairlead/internal/source/kube"
	"github.com/fairlead/fairlead/internal/status"
)

// clusterQuery reads the inventories of a cluster's nodes from the Kubernetes API, where
// no agent or host is to be asked.
type clusterQuery struct {
	enabled                   bool
	node, kubeconfig, context string
}

func (q *clusterQuery) register(c *cobra.Command) {
	c.Flags().BoolVar(&q.enabled, "cluster", false, "read what the agents of a cluster's nodes wrote to the Kubernetes API")
	q.registerAccess(c)
}

func (q *clusterQuery) registerAccess(c *cobra.Command) {
	c.Flags().StringVar(&q.node, "node", "", "with --cluster, only this node")
	c.Flags().StringVar(&q.kubeconfig, "kubeconfig", "", "with --cluster, the kubeconfig (default: the service account in a pod, $KUBECONFIG or ~/.kube/config)")
	c.Flags().StringVar(&q.context, "kube-context", "", "with --cluster, the context of the kubeconfig (default: its current one)")
}

// validate refuses flags that need --cluster, and those of agents and hosts with it.
func (q *clusterQuery) validate(c *cobra.Command, others ...string) error {
	if !q.enabled {
		others = []string{"node", "kubeconfig", "kube-context"}
	}
	for _, name := range others {
		switch {
		case !c.Flags().Changed(name):
		case q.enabled:
			return usageError{errors.New("--" + name + ": not with --cluster")}
		default:
			return usageError{errors.New("--" + name + ": only with --cluster")}
		}
	}
	return nil
}

// client connects as the flags say. The caller closes the client.
func (q *clusterQuery) client() (*inventory.Client, error) {
	o := kube.Options{Context: q.context, Logger: slog.New(slog.DiscardHandler)}
	home, _ := os.UserHomeDir()
	switch {
	case q.kubeconfig != "":
		path, err := filepath.Abs(q.kubeconfig)
		if err != nil {
			return nil, err
		}
		o.Kubeconfigs = []string{path}
	case os.Getenv("KUBERNETES_SERVICE_HOST") == "" && os.Getenv("KUBECONFIG") == "" && home != "":
		o.Kubeconfigs = append([]string{filepath.Join(home, ".kube", "config")}, kube.Kubeconfigs()...)
	}
	access, err := kube.New(o)
	if err != nil {
		return nil, err
	}
	conf, _, err := access.Access()
	if err != nil {
		return nil, err
	}
	return inventory.NewClient(conf)
}

// list reads the ports of all nodes, or of one.
func (q *clusterQuery) list(ctx context.Context) (status.List, error) {
	c, err := q.client()
	if err != nil {
		return status.List{}, err
	}
	defer c.Close()
	objects, _, err := c.List(ctx, q.node)
	if err != nil {
		return status.List{}, err
	}
	if q.node != "" && len(objects) == 0 {
		return status.List{}, errors.New("node " + status.Quote(q.node) + " has no inventory: does an agent run there with cluster.inventory?")
	}
	return inventory.ListOf(objects, time.Now()), nil
}

// ls prints the list.
func (q *clusterQuery) ls(c *cobra.Command, filter status.Filter, out output, bare bool) error {
	l, err := q.list(c.Context())
	if err != nil {
		return err
	}
	empty := "No ports."
	switch {
	case len(l.Sources) == 0:
		empty = "No node has an inventory: its agents write one with cluster.inventory."
	case len(l.Publications) > 0:
		empty = "No ports match the filter."
	}
	l = filter.List(l)
	if out.format == "json" {
		return newEncoder(c.OutOrStdout()).Encode(versioned(l))
	}
	return status.WriteCluster(c.OutOrStdout(), l, status.Style{
		Wide: out.format == "wide", Width: width(c.OutOrStdout(), out.format == "wide"),
		Paint: painter(c.OutOrStdout()), Now: time.Now(), Empty: empty, Bare: bare,
	})
}

// watch reports events until ctx ends.
func (q *clusterQuery) watch(ctx context.Context, report func(status.Event) error) error {
	c, err := q.client()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Watch(ctx, q.node, report)
}
