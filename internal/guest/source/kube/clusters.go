// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"crypto/sha256"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// NewAll returns the sources that follow the clusters of all kubeconfigs. The first one is named
// as o says and takes the first kubeconfig that it can use. The others have one kubeconfig each,
// are named after it, and have nothing to do while another source follows its cluster. memory
// returns the memory of the source of that name. All must run.
func NewAll(o Options, memory func(source string) engine.Memory) ([]*Source, error) {
	main, err := New(o)
	if err != nil {
		return nil, err
	}
	main.o.Memory = memory(main.Name())
	if main.inCluster || len(main.o.Kubeconfigs) < 2 {
		return []*Source{main}, nil
	}
	names := namesOf(main.o.Kubeconfigs)
	all := &clusters{names: names, claims: make(map[*Source]claim), shown: make(map[*Source]string), begun: make(chan struct{})}
	all.members = []*Source{main}
	for _, path := range main.o.Kubeconfigs {
		one := o
		one.SourceName, one.Kubeconfigs = main.Name()+":"+names[path], []string{path}
		one.Memory = memory(one.SourceName)
		s, err := New(one)
		if err != nil {
			return nil, err
		}
		all.members = append(all.members, s)
	}
	for _, s := range all.members {
		s.clusters, s.news, s.files = all, schedule.NewSignal(), schedule.NewSignal()
	}
	return all.members, nil
}

// Optional reports whether the source may have nothing to do, and is not shown then.
func (s *Source) Optional() bool { return s.clusters != nil && s != s.clusters.members[0] }

// namesOf returns what the cluster of each kubeconfig is called: after its distribution or its
// file, or its whole path where two would be called the same.
func namesOf(paths []string) map[string]string {
	names, times := make(map[string]string), make(map[string]int)
	for _, p := range paths {
		base := filepath.Base(p)
		name := strings.TrimSuffix(base, filepath.Ext(base))
		switch p {
		case kubeadmConfig:
			name = "kubeadm"
		case k0sConfig:
			name = "k0s"
		}
		names[p] = name
		times[name]++
	}
	for p, name := range names {
		if name == "" || times[name] > 1 {
			names[p] = p
		}
	}
	return names
}

// clusters is who follows which cluster, so that each is followed once. A nil one is of a source
// alone. Its lock is taken last, and nothing is called with it.
type clusters struct {
	members []*Source         // the first is the main one
	names   map[string]string // of clusters, by kubeconfig
	begun   chan struct{}     // closed when the main source has chosen
	begin   sync.Once

	mu     sync.Mutex
	claims map[*Source]claim
	shown  map[*Source]string // the cluster whose objects a source has reported
}

// claim is a kubeconfig, and the server that it names; "" if it cannot be read.
type claim struct{ path, server string }

// server tells the clusters of configurations apart; "" if it is not known.
func (c config) server() string {
	if c.rest == nil {
		return ""
	}
	ca := sha256.Sum256(c.rest.CAData)
	return strings.TrimSuffix(c.rest.Host, "/") + " " + string(ca[:])
}

// by returns who keeps s from a claim: another source has the kubeconfig or the server, or the
// main source, which chooses first, has none. "" is nobody. c.mu is held.
func (c *clusters) by(s *Source, want claim) string {
	for _, m := range c.members {
		has, ok := c.claims[m]
		if m != s && ok && (has.path == want.path || want.server != "" && has.server == want.server) {
			return m.Name()
		}
	}
	_, holds := c.claims[s]
	if _, chosen := c.claims[c.members[0]]; s != c.members[0] && !holds && !chosen {
		return c.members[0].Name()
	}
	return ""
}

// takenBy returns who keeps s from a claim, "" for nobody.
func (c *clusters) takenBy(s *Source, want claim) string {
	if c == nil {
		return ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.by(s, want)
}

// take makes a claim the only one of s, unless somebody keeps it from that: then it returns who.
func (c *clusters) take(s *Source, want claim) (by string) {
	if c == nil {
		return ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if by := c.by(s, want); by != "" {
		return by
	}
	if c.claims[s] != want {
		c.claims[s] = want
		c.notify()
	}
	return ""
}

// release gives up the claim of s.
func (c *clusters) release(s *Source) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, had := c.claims[s]; had {
		delete(c.claims, s)
		c.notify()
	}
}

// path returns the kubeconfig that s has claimed, "" if none.
func (c *clusters) path(s *Source) string {
	if c == nil {
		return ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.claims[s].path
}

// show notes that s reports the objects of the cluster that it has claimed.
func (c *clusters) show(s *Source) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if name := c.names[c.claims[s].path]; name != "" && c.shown[s] != name {
		c.shown[s] = name
		c.notify()
	}
}

// hide notes that s has withdrawn all that it reported.
func (c *clusters) hide(s *Source) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, had := c.shown[s]; had {
		delete(c.shown, s)
		c.notify()
	}
}

// name returns what owners in the cluster of s have as its name: none while there is one cluster.
func (c *clusters) name(s *Source) string {
	if c == nil {
		return ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.shown[s]
	for _, other := range c.shown {
		if other != own {
			return own
		}
	}
	return ""
}

// notify tells all sources that claims or names have changed. c.mu is held.
func (c *clusters) notify() {
	for _, m := range c.members {
		m.news.Notify()
	}
}

// chosen notes that s has looked for its kubeconfig.
func (c *clusters) chosen(s *Source) {
	if c != nil && s == c.members[0] {
		c.begin.Do(func() { close(c.begun) })
	}
}

// await returns when s may look for its kubeconfig: the main source looks first.
func (c *clusters) await(ctx context.Context, s *Source) error {
	if c == nil || s == c.members[0] {
		return nil
	}
	return schedule.Wait(ctx, time.Time{}, c.begun)
}

// tell tells all sources of changes of kubeconfigs until ctx ends: to watch files takes memory.
func (c *clusters) tell(ctx context.Context, changed schedule.Signal) {
	for schedule.Wait(ctx, time.Time{}, changed) == nil {
		for _, m := range c.members {
			m.files.Notify()
		}
	}
}

// watch wakes s when its kubeconfig changed, or became its own to follow, and keeps the name of
// the cluster, until ctx ends. What is another source's to follow is no reason to wake.
func (s *Source) watch(ctx context.Context, st *state) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.files:
			if s.clusters.path(s) != "" || s.finds(true) {
				s.wake.Notify()
			}
		case <-s.news:
			st.setCluster(s.clusters.name(s))
			if s.clusters.path(s) == "" && s.finds(false) {
				s.wake.Notify()
			}
		}
	}
}

// finds reports whether there is a kubeconfig that s may follow; unusable ones count or do not.
func (s *Source) finds(unusable bool) bool {
	return slices.ContainsFunc(s.o.Kubeconfigs, func(path string) bool {
		c, err := s.readFile(path)
		if err != nil && (!unusable || missing(c, err)) {
			return false
		}
		return s.clusters.takenBy(s, claim{path, c.server()}) == ""
	})
}

// setCluster changes the cluster of all owners.
func (st *state) setCluster(name string) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if !st.rename(name) {
		return
	}
	var change port.Change
	for _, id := range slices.Sorted(maps.Keys(st.reported)) {
		bs := slices.Clone(st.reported[id])
		for i := range bs {
			bs[i].Owner.Cluster = name
		}
		st.reported[id] = bs
		change.Put = append(change.Put, bs...)
	}
	if len(change.Put) > 0 {
		st.feed.Apply(change)
	}
	st.facts.Announce()
}

// rename changes the cluster of the pods, and of what is declared from now on. It reports
// whether it was another one. st.mu is held.
func (st *state) rename(cluster string) bool {
	if st.cluster == cluster {
		return false
	}
	st.cluster = cluster
	put := make(map[string]engine.Fact)
	for _, all := range st.slices {
		for _, e := range all {
			for _, object := range e.objects {
				if f, ok := st.facts.Fact(object); ok {
					put[object] = f
				}
			}
		}
	}
	st.facts.Swap(nil, st.inCluster(put))
	return true
}

// inCluster gives the owners of facts the name of the cluster. It returns facts.
func (st *state) inCluster(facts map[string]engine.Fact) map[string]engine.Fact {
	for object, f := range facts {
		f.Owner.Cluster = st.cluster
		facts[object] = f
	}
	return facts
}
