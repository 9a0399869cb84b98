// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/cilium/ebpf/rlimit"
)

// ConflictOptions configure Conflicts. The zero value is useful.
type ConflictOptions struct {
	// Methods limits the methods that are tried, by name: MethodFentry, MethodCgroup.
	// Empty means all.
	Methods []string
}

// Conflicts tells when somebody in one network namespace wants a port that is
// watched: who asks is refused it as long as another socket has the address.
type Conflicts struct {
	method string
	lost   string
	err    error // why better methods failed
	reader *ringbuf.Reader
	bits   *ebpf.Map
	made   closers
	once   sync.Once
	closed error

	mu    sync.Mutex
	words map[uint32]uint32 // what stands in bits
}

// conflictMethods are the attach chain.
var conflictMethods = []struct {
	name, lost string
	hooks      []string
}{
	{MethodFentry, "", []string{"conflict_tcp", "conflict_udp"}},
	{MethodCgroup, "who asks for a port is told before it is refused, which it might not be", []string{"conflict_bind4", "conflict_bind6"}},
}

// OpenConflicts attaches, for the network namespace of the calling thread, the
// first method that the kernel takes, or returns why it takes none. The caller
// calls Run or Close.
func OpenConflicts(opt ConflictOptions) (*Conflicts, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ns, err := openNamespace()
	if err != nil {
		return nil, fmt.Errorf("observe refused ports: %w", err)
	}
	defer func() { _ = ns.close() }()
	var errs []error
	for _, r := range conflictMethods {
		if len(opt.Methods) > 0 && !slices.Contains(opt.Methods, r.name) {
			continue
		}
		c := &Conflicts{method: r.name, lost: r.lost, err: errors.Join(errs...), words: make(map[uint32]uint32)}
		err := c.attach(ns.inode, r.hooks)
		if err == nil {
			return c, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", r.name, errors.Join(err, c.Close())))
	}
	return nil, fmt.Errorf("observe refused ports: %w", errors.Join(errs...))
}

func (c *Conflicts) attach(netns uint32, hooks []string) error {
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("raise the limit of locked memory: %w", err)
	}
	spec, err := loadConflict()
	if err != nil {
		return err
	}
	pidns, err := pidNamespace()
	if err != nil {
		return err
	}
	if err := errors.Join(
		spec.Variables[conflictVarNetworkNamespace].Set(netns), spec.Variables[conflictVarPidNamespace].Set(pidns),
	); err != nil {
		return fmt.Errorf("configure: %w", err)
	}
	for name := range spec.Programs {
		if !slices.Contains(hooks, name) {
			delete(spec.Programs, name)
		}
	}
	// Those that the hooks of the other objects need.
	for _, name := range []string{conflictMapControls, conflictMapLosses, conflictMapTracked} {
		delete(spec.Maps, name)
	}
	spec.Maps[conflictMapEvents].MaxEntries = 64 << 10
	collection, err := ebpf.NewCollection(spec)
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	c.made = append(c.made, closer(func() error { collection.Close(); return nil }))
	c.bits = collection.Maps[conflictMapPlaceholders]
	if c.reader, err = ringbuf.NewReader(collection.Maps[conflictMapEvents]); err != nil {
		return fmt.Errorf("ring buffer: %w", err)
	}
	c.made = append(c.made, c.reader)
	for _, hook := range hooks {
		on, err := attachConflict(collection.Programs[hook], spec.Programs[hook])
		if err != nil {
			return fmt.Errorf("attach %s: %w", hook, err)
		}
		c.made = append(c.made, on)
	}
	return nil
}

func attachConflict(p *ebpf.Program, spec *ebpf.ProgramSpec) (io.Closer, error) {
	if spec.Type == ebpf.Tracing {
		return link.AttachTracing(link.TracingOptions{Program: p, AttachType: spec.AttachType})
	}
	root, err := cgroupRoot()
	if err != nil {
		return nil, err
	}
	return link.AttachCgroup(link.CgroupOptions{Path: root, Attach: spec.AttachType, Program: p})
}

// RefusedPort is the capability that Conflicts has, as Method names it.
const RefusedPort = "refused-port"

// Method is the mechanism in use.
func (c *Conflicts) Method() Method {
	return Method{Capability: RefusedPort, Name: c.method, Err: c.err, Lost: c.lost}
}

// Watch begins or ends to watch a port. It may be called from any goroutine.
func (c *Conflicts) Watch(p uint16, on bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	word, bit := uint32(p/32), uint32(1)<<(p%32)
	bits := c.words[word] &^ bit
	if on {
		bits |= bit
	}
	if err := c.bits.Put(word, bits); err != nil {
		return fmt.Errorf("watch port %d: %w", p, err)
	}
	c.words[word] = bits
	return nil
}

// Run calls f with each socket that somebody wants to bind to a watched port:
// Address and Port are those asked for. f must not block. Run ends with ctx, and
// returns nil then. It detaches.
func (c *Conflicts) Run(ctx context.Context, f func(Socket)) error {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	d := newDecoder()
	var sample ringbuf.Record
	var r record
	for {
		err := c.reader.ReadInto(&sample)
		if errors.Is(err, os.ErrClosed) {
			return c.Close()
		}
		if err == nil {
			err = d.decode(sample.RawSample, &r)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("observe refused ports: %w", err), c.Close())
		}
		f(r.socket)
	}
}

// Close detaches and ends Run. It may be called more than once.
func (c *Conflicts) Close() error {
	c.once.Do(func() {
		slices.Reverse(c.made)
		c.closed = c.made.Close()
	})
	return c.closed
}
