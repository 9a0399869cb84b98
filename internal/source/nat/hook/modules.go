// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hook

import (
	"context"
	"errors"
	"fmt"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/kernel/bpf"
	"github.com/fairlead/fairlead/internal/schedule"
)

// Modules reports when a kernel module was loaded, so that its functions can be
// attached to.
type Modules struct {
	loaded schedule.Signal
	object *kernel.Object
	reader *kernel.Reader
}

// OpenModules attaches to the tracepoint of module loads. A kernel without
// modules has none. The caller calls Run. types may be nil.
func OpenModules(types *kernel.Types) (*Modules, error) {
	m := &Modules{loaded: schedule.NewSignal()}
	if err := m.open(types); err != nil {
		return nil, fmt.Errorf("observe modules: %w", err)
	}
	return m, nil
}

func (m *Modules) open(types *kernel.Types) (err error) {
	m.object, err = kernel.Open(types, kernel.Config{
		Files: []kernel.File{bpf.LoadNat}, Maps: []string{bpf.NatMapModules},
	})
	if err != nil {
		return err
	}
	if m.reader, err = m.object.Reader(bpf.NatMapModules); err == nil {
		err = m.object.Attach([]string{bpf.NatProgModuleLoad})
	}
	m.object.FinishAttach()
	if err != nil {
		return errors.Join(err, m.object.Close())
	}
	return nil
}

// Loaded receives after a module was loaded; several loads may be one receive. It
// is closed when Run ends.
func (m *Modules) Loaded() <-chan struct{} { return m.loaded }

// Run reports loads until ctx ends, and returns nil then. It detaches.
func (m *Modules) Run(ctx context.Context) error {
	if err := notify(ctx, m.object, m.reader, m.loaded); err != nil {
		return fmt.Errorf("observe modules: %w", err)
	}
	return nil
}
