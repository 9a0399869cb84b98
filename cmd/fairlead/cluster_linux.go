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

// errViolations only sets the exit status: the report has the details.
var errViolations = errors.New("the policy is violated, or a node could not be audited")

func newAudit() *cobra.Command {
	var cluster clusterQuery
	var file string
	var out output
	c := &cobra.Command{
		Use: "audit --cluster -f POLICY", Short: "List ports of a cluster's nodes that a policy does not allow", Args: noArgs, GroupID: groupCheck,
		Long: "List ports of a cluster's nodes that are open wider than loopback and that a policy does not allow.\n\n" +
			"The policy has the rules of a configuration: the first that matches decides, and what no rule\n" +
			"allows is a violation. Nothing is closed: this compares the nodes' inventories to a file.\n\n" +
			"Exit status: 0 if all nodes comply, 1 if one does not or could not be audited, 2 usage error.",
		Example: "  fairlead audit --cluster -f policy.yaml\n  fairlead audit --cluster -f policy.yaml -o json | jq '.violations[].node'",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if !cluster.enabled || file == "" {
				return usageError{errors.New("want --cluster and -f POLICY")}
			}
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			policy, err := inventory.ParsePolicy(file, text)
			if err != nil {
				return usageError{err}
			}
			a, err := cluster.audit(c.Context(), policy)
			if err == nil {
				err = writeAudit(c, a, out)
			}
			if err == nil && !a.Passed() {
				err = errViolations
			}
			return err
		},
	}
	cluster.register(c)
	c.Flags().StringVarP(&file, "file", "f", "", "file with the policy")
	out.register(c, "table", "wide", "json")
	return c
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

func writeAudit(c *cobra.Command, a inventory.Audit, out output) error {
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
		Wide: out.format == "wide", Width: width(c.OutOrStdout(), out.format == "wide"), Paint: painter(c.OutOrStdout()), Now: time.Now(),
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
