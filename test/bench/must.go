// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/test/kit/netns"
)

// failure is what check panics with. A measurement ends at its first error, like a test;
// attempt turns the panic into an error again.
type failure struct{ error }

func check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

// attempt returns the error with which f failed.
func attempt(f func()) (err error) {
	defer func() {
		r := recover()
		failed, ok := r.(failure)
		if r != nil && !ok {
			panic(r)
		}
		err = failed.error
	}()
	f()
	return nil
}

// together calls f for all at the same time, and fails if one of them does.
func together[T any](ctx context.Context, all []T, f func(context.Context, T)) {
	group, ctx := errgroup.WithContext(ctx)
	for _, v := range all {
		group.Go(func() error { return attempt(func() { f(ctx, v) }) })
	}
	check(group.Wait())
}

// inside calls f in a namespace.
func inside(s *netns.Space, f func()) {
	check(s.Do(func() error { return attempt(f) }))
}
