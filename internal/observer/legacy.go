// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
)

// MethodTracepoint observes by a classic tracepoint of a system call.
const MethodTracepoint = "tracepoint"

// LegacyOptions configure a Legacy. The zero value is useful.
type LegacyOptions struct {
	// NetNS is the path of the network namespace to observe; empty is that of
	// the process.
	NetNS string
	// Methods limits the methods that are tried, by name: MethodFentry, MethodKprobe,
	// MethodTracepoint. Empty means all.
	Methods []string
	// Types, if not nil, is shared with others that load programs.
	Types *Types
}

// Legacy tells when a legacy iptables table of one network namespace was replaced.
type Legacy struct {
	changed chan struct{}
	method  string
	lost    error // why better methods failed
	reader  *ringbuf.Reader
	made    closers
	once    sync.Once
	closed  error
}

// legacyMethods are the attach chain. What is in a module that is not loaded
// cannot be attached to; the tracepoint sees its use all the same.
var legacyMethods = []struct {
	name  string
	hooks []string
}{
	{MethodFentry, []string{"legacy_fexit"}},
	{MethodKprobe, []string{"legacy_kprobe"}},
	{MethodTracepoint, []string{"legacy_exit", "legacy_enter"}},
}

// OpenLegacy attaches the first method that the kernel takes, or returns why it
// takes none. The caller calls Run or Close.
func OpenLegacy(opt LegacyOptions) (*Legacy, error) {
	netns, err := netnsInode(opt.NetNS)
	if err != nil {
		return nil, fmt.Errorf("observe legacy tables: %w", err)
	}
	var errs []error
	for _, r := range legacyMethods {
		if len(opt.Methods) > 0 && !slices.Contains(opt.Methods, r.name) {
			continue
		}
		l := &Legacy{changed: make(chan struct{}, 1), method: r.name, lost: errors.Join(errs...)}
		err := opt.Types.lend(func(types *btf.Cache) error { return l.attach(netns, r.hooks, types) })
		if err == nil {
			return l, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", r.name, errors.Join(err, l.Close())))
	}
	return nil, fmt.Errorf("observe legacy tables: %w", errors.Join(errs...))
}

func (l *Legacy) attach(netns uint32, hooks []string, types *btf.Cache) error {
	spec, err := loadNat()
	if err != nil {
		return err
	}
	if err := spec.Variables[natVarObservedNetns].Set(netns); err != nil {
		return fmt.Errorf("configure: %w", err)
	}
	for name := range spec.Programs {
		if !slices.Contains(hooks, name) {
			delete(spec.Programs, name)
		}
	}
	delete(spec.Maps, natMapModules)
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Cache: types})
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	l.made = append(l.made, closer(func() error { collection.Close(); return nil }))
	if l.reader, err = ringbuf.NewReader(collection.Maps[natMapReplacements]); err != nil {
		return fmt.Errorf("ring buffer: %w", err)
	}
	l.made = append(l.made, l.reader)
	for _, hook := range hooks {
		on, err := attachLegacy(hook, collection.Programs[hook])
		if err != nil {
			return fmt.Errorf("attach %s: %w", hook, err)
		}
		l.made = append(l.made, on)
	}
	return nil
}

func attachLegacy(hook string, p *ebpf.Program) (io.Closer, error) {
	switch hook {
	case "legacy_fexit":
		return link.AttachTracing(link.TracingOptions{Program: p})
	case "legacy_kprobe":
		return link.Kprobe("xt_replace_table", p, nil)
	case "legacy_enter":
		return attachTracepoint("syscalls", "sys_enter_setsockopt", p)
	}
	return attachTracepoint("syscalls", "sys_exit_setsockopt", p)
}

// Method names the mechanism in use.
func (l *Legacy) Method() string { return l.method }

// Err says why better methods failed, nil if none did.
func (l *Legacy) Err() error { return l.lost }

// LegacyChanged receives after a table may have been replaced; several
// replacements may be told once. It is closed when Run ends.
func (l *Legacy) LegacyChanged() <-chan struct{} { return l.changed }

// Run tells of replacements until ctx ends, and returns nil then. It detaches.
func (l *Legacy) Run(ctx context.Context) error {
	defer close(l.changed)
	if err := runWakes(ctx, l.reader, l.Close, l.changed); err != nil {
		return fmt.Errorf("observe legacy tables: %w", err)
	}
	return nil
}

// Close detaches and ends Run. It may be called more than once.
func (l *Legacy) Close() error {
	l.once.Do(func() {
		slices.Reverse(l.made)
		l.closed = l.made.Close()
	})
	return l.closed
}
