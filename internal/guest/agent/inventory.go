// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/guest/gather"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/kube"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/status/inventory"
	"github.com/fairlead/fairlead/internal/status/version"
)

const (
	// inventoryPause is the least time between two looks at the tables for the inventory.
	inventoryPause = time.Second
	// inventoryWait is how long the first report waits for sources, which may hang. It says
	// which are missing.
	inventoryWait = 20 * time.Second
	// examineEvery is how often the doctor examines this agent for the inventory.
	examineEvery = 5 * time.Minute
)

// inventoried is the inventory of this node in the Kubernetes API.
type inventoried struct {
	node    string
	writer  *inventory.Writer
	policy  *inventory.Compliance // nil without one
	changed schedule.Signal

	healthy  inventory.Condition
	examined time.Time // when healthy was found
}

// wireInventory makes the writer of the inventory, if the configuration wants one.
func (a *Agent) wireInventory() error {
	c, k := a.cfg.Cluster, a.cfg.Kube
	if !c.Inventory {
		return nil
	}
	access := a.kube
	if access == nil {
		var err error
		if access, err = kube.New(kube.Options{Kubeconfigs: k.Kubeconfigs, Context: k.Context, Retry: a.engineRetry(), Logger: a.log}); err != nil {
			return err
		}
	}
	machine, namespace, err := inventory.ThisMachine()
	if err != nil {
		return fmt.Errorf("inventory: %w", err)
	}
	a.inventory = &inventoried{changed: schedule.NewSignal(), node: cmp.Or(c.NodeName, strings.ToLower(machineName("node")))}
	if c.Policy != "" {
		a.inventory.policy = inventory.NewCompliance(c.Policy, config.ReadFile, a.log)
	}
	a.inventory.writer = inventory.NewWriter(inventory.Options{
		Node: a.inventory.node, Interval: c.Interval, Machine: machine, Namespace: namespace,
		Config: access.Access, Lock: inventory.LockNode, Report: a.report, Changed: a.inventory.changed, Logger: a.log,
	})
	return nil
}

// runInventory keeps the inventory up to date. It never ends the agent.
func (a *Agent) runInventory(ctx context.Context) {
	if schedule.Wait(ctx, time.Now().Add(inventoryWait), a.registry.Ready()) != nil {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = a.inventory.writer.Run(ctx)
	}()
	defer func() { <-done }()
	pubs, outs, sources := a.registry.Publications().Watch(), a.reconciler.Outcomes().Watch(), a.registry.Sources().Watch()
	defer pubs.Close()
	defer outs.Close()
	defer sources.Close()
	for {
		select {
		case <-ctx.Done():
			return
		case <-pubs.C():
		case <-outs.C():
		case <-sources.C():
		}
		pubs.Take()
		outs.Take()
		sources.Take()
		a.inventory.changed.Notify()
		if schedule.Sleep(ctx, inventoryPause) != nil {
			return
		}
	}
}

// reloadPolicy reads the policy again.
func (a *Agent) reloadPolicy() {
	if a.inventory != nil && a.inventory.policy != nil {
		a.inventory.policy.Load()
		a.inventory.changed.Notify()
	}
}

// verdict is what the policy says of the ports now, and whether there is one.
func (a *Agent) verdict() (v inventory.Verdict, ok bool) {
	i := a.inventory
	if i == nil || i.policy == nil {
		return v, false
	}
	return i.policy.Judge(i.node, i.writer.Labels(), a.listed()), true
}

// report is the content of the inventory.
func (a *Agent) report(ctx context.Context) inventory.Report {
	healthy := a.healthyCondition(ctx)
	r := a.listed()
	r.Conditions = append(r.Conditions, healthy)
	if p := a.inventory.policy; p != nil {
		r.Conditions = append(r.Conditions, p.Judge(a.inventory.node, a.inventory.writer.Labels(), r).Condition())
	}
	return r
}

// listed is the ports, and whether these are all.
func (a *Agent) listed() inventory.Report {
	r := inventory.Report{Agent: version.String(), Conditions: []inventory.Condition{a.readyCondition()}}
	select {
	case <-a.registry.Ready():
	default:
		r.Starting = true
	}
	pubs, outs := a.registry.Publications().View(), a.reconciler.Outcomes().View()
	for _, p := range pubs.All() {
		row := describe(p, outs)
		listed := inventory.Port{
			Key: p.Key, State: row.State, Since: p.Since.UTC().Truncate(time.Second), Owner: inventory.OwnerOf(p.Owner),
			Withheld: inventory.Withheld(p.Origins),
		}
		for _, o := range p.Origins {
			listed.Sources = append(listed.Sources, o.Source)
		}
		slices.Sort(listed.Sources)
		listed.Sources = slices.Compact(listed.Sources)
		r.Ports = append(r.Ports, listed)
	}
	return r
}

// readyCondition is whether the list is complete.
func (a *Agent) readyCondition() inventory.Condition {
	var not []string
	for _, s := range a.registry.Sources().View().All() {
		if s.State != registry.Live {
			not = append(not, strings.TrimSuffix(fmt.Sprintf("source %s is %s: %s", s.Name, s.State, s.Error), ": "))
		}
	}
	if len(not) > 0 {
		return inventory.Condition{Type: inventory.ConditionReady, Reason: "SourceNotLive", Message: strings.Join(not, "; ")}
	}
	return inventory.Condition{Type: inventory.ConditionReady, True: true, Reason: "SourcesLive"}
}

// healthyCondition is whether no check of the doctor fails.
func (a *Agent) healthyCondition(ctx context.Context) inventory.Condition {
	i := a.inventory
	if time.Since(i.examined) < examineEvery {
		return i.healthy
	}
	facts := gather.Facts(ctx, gather.Options{
		ConfigFile: a.cfg.File(),
		Ask:        func(context.Context, string) (doctor.Agent, error) { return a.Examine(), nil },
	})
	var failing []string
	for _, c := range doctor.Evaluate(facts).Checks {
		if c.State == doctor.Failing {
			failing = append(failing, fmt.Sprintf("%s/%s: %s", c.Area, c.Name, c.Detail))
		}
	}
	i.examined = time.Now()
	i.healthy = inventory.Condition{Type: inventory.ConditionHealthy, True: true, Reason: "ChecksPass"}
	if len(failing) > 0 {
		i.healthy = inventory.Condition{Type: inventory.ConditionHealthy, Reason: "ChecksFail", Message: strings.Join(failing, "; ")}
	}
	return i.healthy
}
