// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/guest/source/kube"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/inventory"
)

// clusterQuery reads the inventories of a cluster's nodes from the Kubernetes API, where
// no agent or host is to be asked.
type clusterQuery struct {
	enabled                   bool
	node, kubeconfig, context string

	violations bool // of a policy, in place of all ports
	policy     string
}

func (q *clusterQuery) register(c *cobra.Command) {
	c.Flags().BoolVar(&q.enabled, "cluster", false, "read what the agents of a cluster's nodes wrote to the Kubernetes API")
	c.Flags().StringVar(&q.node, "node", "", "with --cluster, only this node")
	c.Flags().StringVar(&q.kubeconfig, "kubeconfig", "", "with --cluster, the kubeconfig (default: the service account in a pod, $KUBECONFIG or ~/.kube/config)")
	c.Flags().StringVar(&q.context, "kube-context", "", "with --cluster, the context of the kubeconfig (default: its current one)")
}

// registerViolations registers the flags of a list of violations.
func (q *clusterQuery) registerViolations(c *cobra.Command) {
	c.Flags().BoolVar(&q.violations, "violations", false, "with --cluster, only ports wider than loopback that the policy of -f does not allow")
	c.Flags().StringVarP(&q.policy, "file", "f", "", "with --violations, the file with the policy")
}

// validate refuses flags that need --cluster, and those of agents and hosts with it.
func (q *clusterQuery) validate(c *cobra.Command, others ...string) error {
	if !q.enabled {
		others = []string{"node", "kubeconfig", "kube-context", "violations"}
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
	switch {
	case q.violations && q.policy == "":
		return usageError{errors.New("--violations: want -f POLICY with it")}
	case q.violations && c.Flags().Changed("filter"):
		return usageError{errors.New("--filter: not with --violations")}
	case !q.violations && q.policy != "":
		return usageError{errors.New("--file: only with --violations")}
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
	if q.violations {
		return q.lsViolations(c, out, bare)
	}
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

// longCluster is what the help of ls says of clusters.
const longCluster = "\n\nWith --cluster --violations only ports of a cluster's nodes are listed that are open wider than loopback and\n" +
	"that the policy of -f does not allow. It has the rules of a configuration: the first that matches decides, and\n" +
	"what no rule allows is a violation. Nothing is closed: this compares the nodes' inventories to a file. Exit\n" +
	"status: 0 if all nodes comply, 1 if one does not or could not be audited, 2 usage error."

// errViolations only sets the exit status: the report has the details.
var errViolations = errors.New("the policy is violated, or a node could not be audited")

// lsViolations lists the ports that the policy does not allow.
func (q *clusterQuery) lsViolations(c *cobra.Command, out output, bare bool) error {
	text, err := os.ReadFile(q.policy)
	if err != nil {
		return err
	}
	policy, err := inventory.ParsePolicy(q.policy, text)
	if err != nil {
		return usageError{err}
	}
	a, err := q.audit(c.Context(), policy)
	if err == nil {
		err = writeAudit(c, a, out, bare)
	}
	if err == nil && !a.Passed() {
		err = errViolations
	}
	return err
}

// audit compares all nodes, or one, to the policy.
func (q *clusterQuery) audit(ctx context.Context, policy inventory.Policy) (inventory.Audit, error) {
	c, err := q.client()
	if err != nil {
		return inventory.Audit{}, err
	}
	defer c.Close()
	nodes, err := c.Nodes(ctx)
	if err != nil {
		return inventory.Audit{}, err
	}
	if q.node != "" {
		labels, ok := nodes[q.node]
		if !ok {
			return inventory.Audit{}, errors.New("the cluster has no node " + status.Quote(q.node))
		}
		nodes = map[string]map[string]string{q.node: labels}
	}
	objects, _, err := c.List(ctx, q.node)
	if err != nil {
		return inventory.Audit{}, err
	}
	a := policy.Audit(nodes, objects, time.Now())
	if q.node == "" {
		a.Warnings = policy.Idle(nodes)
	}
	return a, nil
}

func writeAudit(c *cobra.Command, a inventory.Audit, out output, bare bool) error {
	if out.format == "json" {
		return newEncoder(c.OutOrStdout()).Encode(versioned(a))
	}
	l := status.List{Publications: a.Violations}
	wide := 0
	for _, n := range a.Nodes {
		wide += n.Wide
		l.Sources = append(l.Sources, status.Source{Name: n.Name, State: "not audited", Error: n.Error, Warnings: n.Warnings})
	}
	err := status.WriteCluster(c.OutOrStdout(), l, status.Style{
		Wide: out.format == "wide", Width: width(c.OutOrStdout(), out.format == "wide"), Paint: painter(c.OutOrStdout()), Now: time.Now(), Bare: bare,
		Empty: fmt.Sprintf("No violations: %d nodes, %d ports open wider than loopback.", len(a.Nodes), wide),
	})
	for _, text := range a.Warnings {
		_, werr := fmt.Fprintln(c.OutOrStdout(), painter(c.OutOrStdout()).Paint(status.Yellow, text))
		err = errors.Join(err, werr)
	}
	return err
}

// watch reports events until ctx ends, and on stderr what it cannot follow.
func (q *clusterQuery) watch(ctx context.Context, report func(status.Event) error, stderr io.Writer) error {
	c, err := q.client()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Watch(ctx, q.node, report, func(err error) { _, _ = fmt.Fprintln(stderr, "fairlead: "+status.Quote(err.Error())) })
}
