// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/fairlead/fairlead/internal/port"
)

func TestAwaitTCP(t *testing.T) {
	for name, tt := range map[string]struct {
		change port.Change
		want   bool
	}{
		"another address":  {port.Change{Put: []port.Binding{binding("2", "127.0.0.2:6443", 7)}}, true},
		"another number":   {port.Change{Put: []port.Binding{binding("2", "127.0.0.2:6444", 7)}}, false},
		"it was withdrawn": {port.Change{Drop: []port.Origin{{ID: "1"}}}, false},
		"another protocol": {port.Change{Put: []port.Binding{udp(binding("2", "127.0.0.2:6443", 7))}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRegistry()
				feed := r.Feed("socket")
				feed.Replace([]port.Binding{binding("1", "127.0.0.1:6443", 7)})
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- r.AwaitTCP(ctx, 6443) }()
				synctest.Wait()
				feed.Apply(tt.change)
				synctest.Wait()
				cancel()
				if err := <-ended; (err == nil) != tt.want {
					t.Errorf("returned %v", err)
				}
			})
		})
	}
}

func udp(b port.Binding) port.Binding {
	b.Key.Protocol = port.UDP
	return b
}

// Sources that have reported or failed are no longer waited for, others may hang.
func TestAwaitStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRegistry()
		socket, nat := r.Feed("socket"), r.Feed("nat")
		r.Feed("docker")
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			r.AwaitStarted(t.Context(), "socket", "nat", "absent")
		}()
		for _, step := range []func(){func() {}, func() { socket.Replace(nil) }} {
			step()
			synctest.Wait()
			select {
			case <-ended:
				t.Error("returned while a source is starting")
			default:
			}
		}
		nat.Stale(errors.New("no access"))
		<-ended
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		r.AwaitStarted(ctx, "docker")
	})
}
