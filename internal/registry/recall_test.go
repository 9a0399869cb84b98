// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// longAgo is when an earlier agent saw a port.
func longAgo() time.Time { return time.Unix(100, 0) }

// earlierPort is a port that an earlier agent knew.
func earlierPort(addr string, origins ...port.OriginInfo) port.Publication {
	p := port.Publication{Key: binding("", addr, 1).Key, Since: longAgo()}
	for _, o := range origins {
		o.Since = longAgo().Add(time.Second)
		p.Origins = append(p.Origins, o)
	}
	return p
}

func from(source, id string, handle uint64) port.OriginInfo {
	return port.OriginInfo{Origin: port.Origin{Source: source, ID: id}, Handle: handle}
}

// TestAgeOfFoundPort: what the first dump finds was open before, for an unknown time; what
// opens later has an age.
func TestAgeOfFoundPort(t *testing.T) {
	r := newRegistry()
	f := r.Feed("socket")
	event := binding("2", "0.0.0.0:81", 7)
	event.Observed = 1 // while the dump was made
	f.Replace([]port.Binding{binding("1", "0.0.0.0:80", 7), event})
	f.Apply(port.Change{Put: []port.Binding{binding("3", "0.0.0.0:82", 7), binding("4", "0.0.0.0:80", 7)}})
	f.Replace([]port.Binding{binding("1", "0.0.0.0:80", 8), binding("5", "0.0.0.0:83", 7)})
	for number, atLeast := range map[string]bool{"80": true, "83": false} {
		p, _ := r.Publications().View().Get(binding("", "0.0.0.0:"+number, 1).Key)
		if p.Since.IsZero() || p.SinceAtLeast != atLeast {
			t.Errorf("port %s: since %v, at least: %v", number, p.Since, p.SinceAtLeast)
		}
	}
	r = newRegistry()
	f = r.Feed("socket")
	f.Replace([]port.Binding{event})
	f.Apply(port.Change{Put: []port.Binding{binding("3", "0.0.0.0:82", 7)}})
	for _, p := range r.Publications().View().All() {
		if p.SinceAtLeast {
			t.Errorf("%v opened while the agent looked, and its age is not known", p.Key)
		}
	}
}

func TestRecall(t *testing.T) {
	for name, c := range map[string]struct {
		earlier port.Publication
		source  string
		id      string
		addr    string
		handle  uint64
		kept    bool
	}{
		"the same socket":                     {earlierPort("0.0.0.0:80", from("socket", "1", 0)), "socket", "1", "0.0.0.0:80", 0, true},
		"another socket":                      {earlierPort("0.0.0.0:80", from("socket", "1", 0)), "socket", "2", "0.0.0.0:80", 0, false},
		"another port":                        {earlierPort("0.0.0.0:80", from("socket", "1", 0)), "socket", "1", "0.0.0.0:81", 0, false},
		"another address":                     {earlierPort("127.0.0.1:80", from("socket", "1", 0)), "socket", "1", "10.0.0.1:80", 0, false},
		"one half of a dual-stack port":       {earlierPort("[::]:80", from("socket", "1", 0), from("socket", "2", 0)), "socket", "1", "0.0.0.0:80", 0, true},
		"the same rule":                       {earlierPort("0.0.0.0:80", from("nat", "a", 7)), "nat", "a", "0.0.0.0:80", 7, true},
		"a rule that was removed and added":   {earlierPort("0.0.0.0:80", from("nat", "a", 7)), "nat", "a", "0.0.0.0:80", 9, false},
		"a rule without a handle":             {earlierPort("0.0.0.0:80", from("nat", "a", 0)), "nat", "a", "0.0.0.0:80", 0, false},
		"a rule that had no handle":           {earlierPort("0.0.0.0:80", from("nat", "a", 0)), "nat", "a", "0.0.0.0:80", 7, false},
		"a rule that has no handle now":       {earlierPort("0.0.0.0:80", from("nat", "a", 7)), "nat", "a", "0.0.0.0:80", 0, false},
		"a container without a socket":        {earlierPort("0.0.0.0:80", from("docker", "c/80", 0)), "docker", "c/80", "0.0.0.0:80", 0, false},
		"a rule beside one without a handle":  {earlierPort("0.0.0.0:80", from("nat", "a", 7), from("nat", "b", 0)), "nat", "a", "0.0.0.0:80", 7, true},
		"a container that was started anew":   {earlierPort("0.0.0.0:80", from("docker", "c/80", 0), from("socket", "1", 0)), "docker", "c/80", "0.0.0.0:80", 0, false},
		"a rule of a socket that has gone":    {earlierPort("0.0.0.0:80", from("nat", "a", 7), from("socket", "1", 0)), "nat", "a", "0.0.0.0:80", 7, false},
		"a container of a rule that has gone": {earlierPort("0.0.0.0:80", from("docker", "c/80", 0), from("nat", "a", 7)), "docker", "c/80", "0.0.0.0:80", 0, false},
	} {
		r := newRegistry()
		f := r.Feed(c.source)
		r.Recall([]port.Publication{c.earlier})
		b := binding(c.id, c.addr, 7)
		b.Handle = c.handle
		f.Replace([]port.Binding{b})
		p, _ := r.Publications().View().Get(b.Key)
		if kept := p.Since.Equal(longAgo()) && !p.SinceAtLeast && p.Origins[0].Since.Equal(longAgo().Add(time.Second)); kept != c.kept {
			t.Errorf("%s: since %v, at least: %v, origin since %v; want it kept: %v", name, p.Since, p.SinceAtLeast, p.Origins[0].Since, c.kept)
		} else if !kept && !p.SinceAtLeast {
			t.Errorf("%s: the age is not marked as a lower bound", name)
		}
		// A second rule about the same port does not change its age, nor does a new owner.
		b2 := binding("new", c.addr, 9)
		f.Apply(port.Change{Put: []port.Binding{b2}})
		b.Owner.Name = "other"
		f.Apply(port.Change{Put: []port.Binding{b}})
		if q, _ := r.Publications().View().Get(b.Key); !q.Since.Equal(p.Since) || q.SinceAtLeast != p.SinceAtLeast {
			t.Errorf("%s: since went from %v to %v", name, p.Since, q.Since)
		}
		// Closed and opened again, it is new.
		f.Apply(port.Change{Drop: []port.Origin{{ID: c.id}, {ID: "new"}}})
		f.Apply(port.Change{Put: []port.Binding{b}})
		if q, _ := r.Publications().View().Get(b.Key); q.Since.Equal(longAgo()) || q.SinceAtLeast {
			t.Errorf("%s: opened again, it has since %v", name, q.Since)
		}
	}
}

// TestRecallKeepsLowerBound: what was a lower bound remains one.
func TestRecallKeepsLowerBound(t *testing.T) {
	r := newRegistry()
	f := r.Feed("socket")
	e := earlierPort("0.0.0.0:80", from("socket", "1", 0))
	e.SinceAtLeast = true
	r.Recall([]port.Publication{e})
	f.Replace([]port.Binding{binding("1", "0.0.0.0:80", 7)})
	p, _ := r.Publications().View().Get(e.Key)
	if !p.Since.Equal(longAgo()) || !p.SinceAtLeast {
		t.Errorf("since %v, at least: %v", p.Since, p.SinceAtLeast)
	}
}

// TestRecallByLaterSource: the origin that tells may come after others of the port, and
// the others are not older than what was known.
func TestRecallByLaterSource(t *testing.T) {
	for _, first := range []string{"docker", "socket"} {
		r := newRegistry()
		feeds := map[string]Feed{"socket": r.Feed("socket"), "docker": r.Feed("docker")}
		e := earlierPort("[::]:80", from("socket", "1", 0), from("socket", "2", 0), from("docker", "c/80", 0))
		r.Recall([]port.Publication{e})
		report := map[string]func(){
			"docker": func() { feeds["docker"].Replace([]port.Binding{binding("c/80", "0.0.0.0:80", 7)}) },
			"socket": func() {
				feeds["socket"].Replace([]port.Binding{binding("1", "0.0.0.0:80", 7), binding("2", "[::]:80", 7)})
			},
		}
		report[first]()
		for name, f := range report {
			if name != first {
				f()
			}
		}
		p, ok := r.Publications().View().Get(e.Key)
		if !ok || !p.Since.Equal(longAgo()) || p.SinceAtLeast {
			t.Errorf("%s first: since %v, at least: %v", first, p.Since, p.SinceAtLeast)
		}
	}
}

// TestRecallDoesNotShortenWaits: rules about owners wait as long as for a new port.
func TestRecallDoesNotShortenWaits(t *testing.T) {
	r := newRegistry()
	f := r.Feed("socket")
	r.Recall([]port.Publication{earlierPort("0.0.0.0:80", from("socket", "1", 0))})
	f.Replace([]port.Binding{binding("1", "0.0.0.0:80", 7)})
	for _, ms := range r.slots {
		if ms[0].binding.Since.Equal(longAgo()) {
			t.Error("the binding has the time at which an earlier agent saw it")
		}
	}
}
