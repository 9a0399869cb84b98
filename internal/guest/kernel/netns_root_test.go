// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package kernel

import (
	"sync"
	"testing"
)

// The main thread never ends, and /proc/self/ns/net is its namespace.
func TestMainThreadKeepsItsNamespace(t *testing.T) {
	const threads = 64 // at once: more than are idle, so that the main one would be among them
	before, err := NamespaceInode("")
	if err != nil {
		t.Fatal(err)
	}
	space, err := NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = space.Close() }()
	for name, enter := range map[string]func(f func() error) error{
		"Do":       space.Do,
		"OnThread": func(f func() error) error { return OnThread(func() error { return enterAnd(space, f) }) },
	} {
		var inside, done sync.WaitGroup
		inside.Add(threads)
		for range threads {
			done.Go(func() {
				arrived := sync.OnceFunc(inside.Done)
				err := enter(func() error {
					arrived()
					inside.Wait()
					return nil
				})
				if arrived(); err != nil {
					t.Error(err)
				}
			})
		}
		done.Wait()
		if after, err := NamespaceInode(""); err != nil || after != before {
			t.Errorf("%s: the process is in namespace %d, %v; was in %d", name, after, err, before)
		}
	}
}

func enterAnd(space *Namespace, f func() error) error {
	if err := EnterNamespace(space.Path()); err != nil {
		return err
	}
	return f()
}
