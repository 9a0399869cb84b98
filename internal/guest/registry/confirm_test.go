// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// asked are the facts of an engine that answers when the test wants it to.
type asked struct {
	*facts

	declines bool
	lists    chan func()
}

func (a *asked) Confirm(listed func()) bool {
	if a.declines {
		return false
	}
	a.lists <- listed
	return true
}

// takes returns what answers the request for a list, nil if there is none.
func (a *asked) takes() (listed func()) {
	synctest.Wait()
	select {
	case listed = <-a.lists:
	default:
	}
	return listed
}

// answer answers the request for a list that there must be.
func (a *asked) answer(t *testing.T, when string) {
	t.Helper()
	listed := a.takes()
	if listed == nil {
		t.Fatalf("%s: no list was asked for", when)
	}
	listed()
}

// idle checks that no list is asked for.
func (a *asked) idle(t *testing.T, when string) {
	t.Helper()
	if a.takes() != nil {
		t.Errorf("%s: a list was asked for", when)
	}
}

// engine adds an engine that can be asked.
func (g *guarded) engine(name string) (*asked, Feed) {
	a := &asked{facts: &facts{owners: make(map[AttributionKey]port.Owner)}, lists: make(chan func(), 1)}
	g.AddFacts(name, a)
	return a, g.Feed(name)
}

// searchedPort opens a port of a socket whose process is searched for, and of which the lists
// of an engine say nothing.
func searchedPort(t *testing.T) (guarded, port.Binding) {
	t.Helper()
	g := newAsked(t)
	docker, feed := g.engine("docker")
	feed.Replace(nil)
	b := socket("s", "0.0.0.0:8200", "")
	b.Owner, b.Searching = port.Owner{}, true
	g.sockets.Apply(put([]port.Binding{b}))
	time.Sleep(reportTime)
	docker.answer(t, "first")
	time.Sleep(listPause)
	docker.answer(t, "second")
	g.want(t, "no engine knows the process", "pending")
	return g, b
}

// unnamed opens a port of a NAT rule that leads to an address which no engine knows.
func (g *guarded) unnamed(id string) {
	_, rules := proxy(id, 8200, "172.17.0.2")
	g.nat.Apply(put(rules))
}

// An engine that can be asked is asked twice, and nothing but its answers ends the wait.
func TestWaitEndsByTwoLists(t *testing.T) {
	for name, state := range map[string]string{"": "allow", "web": "allow", "secret0": "deny"} {
		synctest.Test(t, func(t *testing.T) {
			g := newAsked(t)
			docker, feed := g.engine("docker")
			feed.Replace(nil)
			time.Sleep(time.Minute)
			docker.idle(t, "nothing waits")
			g.unnamed("c")
			docker.idle(t, "the event may come yet")
			time.Sleep(reportTime)
			listed := docker.takes()
			if listed == nil {
				t.Fatal("no list was asked for")
			}
			time.Sleep(time.Hour)
			g.want(t, "the engine does not answer", "pending")
			listed()
			g.want(t, "a list that may have been too early", "pending")
			time.Sleep(mostListPause - time.Millisecond)
			docker.idle(t, "soon after the first list")
			time.Sleep(time.Millisecond)
			if name != "" {
				docker.put(address("172.17.0.2"), name)
			} else {
				g.want(t, "the second list is under way", "pending")
				docker.answer(t, "the second list")
			}
			g.want(t, "the second list", state)
			time.Sleep(time.Hour)
			if name == "" {
				docker.idle(t, "it was decided")
			}
			g.want(t, "later", state)
		})
	}
}

// An engine is asked for a list at the very time that another one is lost.
func TestEngineIsAskedWhileAnotherIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newAsked(t)
		_, feed := g.engine("docker")
		_, other := g.engine("containerd")
		feed.Replace(nil)
		other.Replace(nil)
		g.unnamed("c")
		time.Sleep(reportTime)
		other.Stale(errors.New("gone"))
		synctest.Wait()
	})
}

// Lists take a part of an engine's time at most, also while another engine comes and goes.
func TestPauseAfterASlowList(t *testing.T) {
	for took, pause := range map[time.Duration]time.Duration{
		0: listPause, listPause / 4: listPause, time.Second: 4 * time.Second, 2 * time.Second: 8 * time.Second, time.Hour: mostListPause,
	} {
		for _, lost := range []string{"never", "before the answer", "after it"} {
			synctest.Test(t, func(t *testing.T) {
				g := newAsked(t)
				docker, feed := g.engine("docker")
				kube, other := g.engine("kube")
				kube.declines = true
				feed.Replace(nil)
				other.Replace(nil)
				g.unnamed("c")
				lose := func(when string) {
					if when == lost {
						other.Stale(errors.New("gone"))
						other.Replace(nil)
					}
				}
				time.Sleep(reportTime)
				listed := docker.takes()
				time.Sleep(took)
				lose("before the answer")
				listed()
				lose("after it")
				when := fmt.Sprintf("a list that took %v, another engine lost %s", took, lost)
				time.Sleep(pause - time.Millisecond)
				docker.idle(t, when)
				time.Sleep(time.Millisecond)
				docker.answer(t, when)
			})
		}
	}
}

// A change of ports wakes what ends the waits only if that has something to do.
func TestBatchesDoNotWakeWhileAListIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New(Options{Rules: allowAll{}, Logger: slog.New(slog.DiscardHandler)})
		g := guarded{Registry: r, sockets: r.Feed("socket"), nat: r.Feed("nat")}
		docker, feed := g.engine("docker")
		n := 0
		batch := func() {
			n++
			_, rules := proxy("c", 8200+n%2, fmt.Sprint("172.17.0.", 2+n))
			g.nat.Apply(put(rules))
		}
		// turn is one of Run.
		turn := func() {
			_, asks := r.endWaits()
			for _, ask := range asks {
				ask()
			}
		}
		woken := func(when string, want bool) {
			t.Helper()
			if got := len(r.waits.wake) > 0; got != want {
				t.Errorf("%s: woken %v, want %v", when, got, want)
			}
			for len(r.waits.wake) > 0 {
				<-r.waits.wake
			}
		}
		batch()
		woken("the engine is starting", false)
		feed.Replace(nil)
		woken("the engine is live", true)
		turn()
		time.Sleep(reportTime)
		turn()
		listed := docker.takes()
		if listed == nil {
			t.Fatal("no list was asked for")
		}
		for range 3 {
			batch()
			woken("the list is awaited", false)
		}
		listed()
		woken("the list was answered", true)
		turn()
		batch()
		woken("the second list is to be asked for later", false)
		time.Sleep(listPause)
		turn()
		docker.answer(t, "the second list")
		woken("the second list was answered", true)
		feed.Stale(errors.New("gone"))
		turn()
		batch()
		woken("the engine is stale", false)
	})
}

// What a port waits for may end by a change of the port.
func TestWaitEndsWhenItsProcessIsFoundAfterTheLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, b := searchedPort(t)
		b.Searching = false
		b.Owner = port.Owner{Kind: port.OwnerProcess, ID: "9", Name: "docker-proxy"}
		g.sockets.Apply(put([]port.Binding{b}))
		g.want(t, "it was found", "allow")
	})
}

// All engines must have answered, since all of them were live.
func TestEachLiveEngineIsAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newAsked(t)
		docker, feed := g.engine("docker")
		containerd, other := g.engine("containerd")
		g.unnamed("c")
		feed.Replace(nil)
		time.Sleep(time.Minute)
		docker.idle(t, "containerd is starting")
		other.Replace(nil)
		time.Sleep(reportTime)
		docker.answer(t, "first")
		late := containerd.takes()
		time.Sleep(listPause)
		docker.answer(t, "second")
		g.want(t, "containerd is slow", "pending")
		docker.idle(t, "Docker has answered")

		other.Stale(errors.New("gone"))
		late()
		time.Sleep(time.Minute)
		containerd.idle(t, "it is stale")
		other.Replace(nil)
		for _, pause := range []time.Duration{reportTime, listPause} {
			time.Sleep(pause)
			g.want(t, "containerd is back", "pending")
			docker.answer(t, "Docker, again")
			containerd.answer(t, "containerd, again")
		}
		g.want(t, "both have answered", "allow")
	})
}

// An engine that is not asked for lists, and the search for a process, have a time.
func TestWaitForWhatCannotBeAskedEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newAsked(t)
		kube, feed := g.engine("kube")
		kube.declines = true
		feed.Replace(nil)
		g.unnamed("c")
		time.Sleep(ownerWait - time.Millisecond)
		g.want(t, "shortly before", "pending")
		time.Sleep(endPause)
		g.want(t, "in time", "allow")
	})
	synctest.Test(t, func(t *testing.T) {
		g, _ := searchedPort(t)
		time.Sleep(ownerWait)
		g.want(t, "in time", "allow")
	})
}
