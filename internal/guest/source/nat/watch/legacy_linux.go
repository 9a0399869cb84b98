// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// LegacyOptions configure a Legacy. The zero value is useful.
type LegacyOptions struct {
	// NetNS is the path of the network namespace to observe; empty is that of
	// the process.
	NetNS string
	// Methods limits the methods that are tried, by name: kernel.MethodFentry,
	// kernel.MethodKprobe, kernel.MethodTracepoint. Empty means all.
	Methods []string
	// Types, if not nil, is shared with others that load programs.
	Types *kernel.Types
}

// Legacy reports when a legacy iptables table of one network namespace was replaced.
type Legacy struct {
	changed schedule.Signal
	method  kernel.Method
	object  *kernel.Object
	reader  *kernel.Reader
}

// legacyTables is the attach chain. The first hook is in the kernel itself: it needs
// neither a table nor CAP_SYS_ADMIN. What is in a module that is not loaded cannot be
// attached to; the tracepoint sees its use all the same.
func legacyTables() kernel.Capability {
	return kernel.Capability{Name: "legacy-tables", Choices: []kernel.Choice{
		{Name: kernel.MethodFentry, Hooks: []string{"legacy_option"}},
		{Name: kernel.MethodFentry, Hooks: []string{"legacy_fexit"}},
		{Name: kernel.MethodKprobe, Hooks: []string{"legacy_kprobe"}},
		{Name: kernel.MethodTracepoint, Hooks: []string{"legacy_exit", "legacy_enter"}},
	}}
}

// OpenLegacy attaches the first method that works, or returns why none does. The
// caller calls Run or Close.
func OpenLegacy(opt LegacyOptions) (*Legacy, error) {
	l := &Legacy{changed: schedule.NewSignal()}
	if err := l.open(opt); err != nil {
		return nil, fmt.Errorf("observe legacy tables: %w", errors.Join(err, l.Close()))
	}
	return l, nil
}

func (l *Legacy) open(opt LegacyOptions) error {
	netns, err := kernel.NamespaceInode(opt.NetNS)
	if err != nil {
		return err
	}
	l.object, err = kernel.Open(opt.Types, kernel.Config{
		Files:     []kernel.File{bpf.LoadNat},
		Constants: map[string]any{bpf.NatVarObservedNetns: netns},
		Maps:      []string{bpf.NatMapReplacements},
	})
	if err != nil {
		return err
	}
	if l.reader, err = l.object.Reader(bpf.NatMapReplacements); err != nil {
		return err
	}
	defer l.object.FinishAttach()
	l.method, err = legacyTables().Attach(l.object.Attach, nil, opt.Methods)
	return err
}

// Method names the mechanism in use.
func (l *Legacy) Method() string { return l.method.Name }

// Better is why better methods failed, nil if none did.
func (l *Legacy) Better() error { return l.method.Err }

// LegacyChanged receives after a table may have been replaced; several
// replacements may be one receive. It is closed when Run ends.
func (l *Legacy) LegacyChanged() <-chan struct{} { return l.changed }

// Run reports replacements until ctx ends, and returns nil then. It detaches.
func (l *Legacy) Run(ctx context.Context) error {
	if err := notify(ctx, l.object, l.reader, l.changed); err != nil {
		return fmt.Errorf("observe legacy tables: %w", err)
	}
	return nil
}

// Close detaches and ends Run. It may be called more than once.
func (l *Legacy) Close() error {
	if l.object == nil {
		return nil
	}
	return l.object.Close()
}

// notify notifies s after each record until ctx ends, and returns nil then. It
// closes the object and s.
func notify(ctx context.Context, o *kernel.Object, r *kernel.Reader, s schedule.Signal) error {
	defer close(s)
	stop := context.AfterFunc(ctx, func() { _ = o.Close() })
	defer stop()
	for {
		_, err := r.Read()
		if errors.Is(err, os.ErrClosed) {
			return o.Close()
		}
		if err != nil {
			return errors.Join(err, o.Close())
		}
		s.Notify()
	}
}
