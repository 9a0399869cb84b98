// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/ringbuf"
)

// Modules tells when a kernel module was loaded, so that hooks in it can be
// attached to.
type Modules struct {
	loaded chan struct{}
	reader *ringbuf.Reader
	made   closers // in the order of closing
}

// OpenModules attaches to the tracepoint of module loads. A kernel without
// modules has none. The caller calls Run. types may be nil.
func OpenModules(types *Types) (_ *Modules, err error) {
	m := &Modules{loaded: make(chan struct{}, 1)}
	defer func() {
		if err != nil {
			err = fmt.Errorf("observe modules: %w", errors.Join(err, m.made.Close()))
		}
	}()
	spec, err := loadNat()
	if err != nil {
		return nil, err
	}
	spec.Programs = map[string]*ebpf.ProgramSpec{natProgModuleLoad: spec.Programs[natProgModuleLoad]}
	spec.Maps = map[string]*ebpf.MapSpec{natMapModules: spec.Maps[natMapModules]}
	clear(spec.Variables)
	var collection *ebpf.Collection
	if err := types.lend(func(cache *btf.Cache) error {
		collection, err = ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Cache: cache})
		return err
	}); err != nil {
		return nil, fmt.Errorf("load: %w", err)
	}
	m.made = closers{closer(func() error { collection.Close(); return nil })}
	if m.reader, err = ringbuf.NewReader(collection.Maps[natMapModules]); err != nil {
		return nil, fmt.Errorf("ring buffer: %w", err)
	}
	m.made = append(closers{m.reader}, m.made...)
	on, err := attachTracepoint("module", "module_load", collection.Programs[natProgModuleLoad])
	if err != nil {
		return nil, err
	}
	m.made = append(closers{on}, m.made...)
	return m, nil
}

// Loaded receives after a module was loaded; several loads may be told once. It
// is closed when Run ends.
func (m *Modules) Loaded() <-chan struct{} { return m.loaded }

// Run tells of loads until ctx ends, and returns nil then. It detaches.
func (m *Modules) Run(ctx context.Context) error {
	defer close(m.loaded)
	return runWakes(ctx, m.reader, m.made.Close, m.loaded)
}

// runWakes sends to wake, which has room for one, after each record of reader,
// until ctx ends; shut is called once and closes the reader.
func runWakes(ctx context.Context, reader *ringbuf.Reader, shut func() error, wake chan<- struct{}) error {
	closed := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() { closed <- shut() })
	var record ringbuf.Record
	for {
		err := reader.ReadInto(&record)
		if err != nil {
			if stop() {
				closed <- shut()
			}
			err2 := <-closed
			if errors.Is(err, os.ErrClosed) {
				err = nil
			}
			return errors.Join(err, err2)
		}
		select {
		case wake <- struct{}{}:
		default: // one that is not yet taken stands for this one too
		}
	}
}
