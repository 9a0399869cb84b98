// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/status"
)

// clusterQuery is for Linux: elsewhere no client of Kubernetes is linked.
type clusterQuery struct{ enabled bool }

const longCluster = ""

var errNoCluster = errors.New("--cluster works on Linux only, as in a pod of the agent")

func (q *clusterQuery) register(c *cobra.Command) {
	c.Flags().BoolVar(&q.enabled, "cluster", false, "works on Linux only")
	_ = c.Flags().MarkHidden("cluster") // the only error is an unknown flag
}

func (q *clusterQuery) registerViolations(*cobra.Command) {}

func (q *clusterQuery) validate(*cobra.Command, ...string) error {
	if q.enabled {
		return usageError{errNoCluster}
	}
	return nil
}

func (q *clusterQuery) ls(*cobra.Command, status.Filter, output, bool) error { return errNoCluster }

func (q *clusterQuery) watch(context.Context, func(status.Event) error, io.Writer) error {
	return errNoCluster
}
