// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// kernel is our part of the kernel: maps, programs and their links. It is used
// by one goroutine, but for misses and track.
type kernel struct {
	specs    []*ebpf.CollectionSpec // the kprobes' only once they are asked for
	maps     map[string]*ebpf.Map
	cache    *btf.Cache      // only while attaching
	cgroup   string          // mount point, "" until asked for
	programs []*ebpf.Program // attached

	configure func(*ebpf.CollectionSpec) error // and add to specs
	explicit  *link.Iter                       // nil unless attached
}

var errNoHook = errors.New("no such hook in this build")

// newKernel makes the maps and lets the hooks see netns. Nothing is attached.
func newKernel(ringBytes int, netns uint32) (*kernel, error) {
	k := &kernel{maps: make(map[string]*ebpf.Map)}
	if err := k.open(ringBytes, netns); err != nil {
		return nil, errors.Join(fmt.Errorf("bpf: %w", err), k.close())
	}
	return k, nil
}

func (k *kernel) open(ringBytes int, netns uint32) error {
	// Before Linux 5.11 maps count against a limit that is far too low.
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("raise the limit of locked memory: %w", err)
	}
	pidns, err := pidNamespace()
	if err != nil {
		return err
	}
	k.configure = func(spec *ebpf.CollectionSpec) error {
		spec.Maps[sockMapEvents].MaxEntries = uint32(ringBytes)
		if err := errors.Join(
			spec.Variables[sockVarNetworkNamespace].Set(netns), spec.Variables[sockVarPidNamespace].Set(pidns),
		); err != nil {
			return fmt.Errorf("configure: %w", err)
		}
		k.specs = append(k.specs, spec)
		return nil
	}
	spec, err := loadSock()
	if err != nil {
		return err
	}
	if err := k.configure(spec); err != nil {
		return err
	}
	for _, name := range []string{
		sockMapEvents, sockMapTracked, sockMapControls, sockMapLosses,
	} {
		m, err := ebpf.NewMap(k.specs[0].Maps[name])
		if err != nil {
			return fmt.Errorf("make map %s: %w", name, err)
		}
		k.maps[name] = m
	}
	return nil
}

// ring opens the ring buffer; the caller closes it.
func (k *kernel) ring(ringBytes int) (*ring, error) {
	fd, err := unix.FcntlInt(uintptr(k.maps[sockMapEvents].FD()), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("ring buffer: duplicate: %w", err)
	}
	control, err := unix.FcntlInt(uintptr(k.maps[sockMapControls].FD()), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("ring buffer: duplicate: %w", err)
	}
	return newRing(fd, ringBytes, control)
}

// attach implements attacher: it loads and attaches the programs in order, and
// undoes that if one fails.
func (k *kernel) attach(hooks []string) (_ io.Closer, err error) {
	var made closers // in the order of making
	defer func() {
		if err != nil {
			slices.Reverse(made)
			err = errors.Join(err, made.Close())
		}
	}()
	if err := k.needKprobes(hooks); err != nil {
		return nil, err
	}
	specs := make(map[string]*ebpf.ProgramSpec)
	programs := make(map[string]*ebpf.Program)
	for _, spec := range k.specs {
		wanted := maps.Clone(spec.Programs)
		maps.DeleteFunc(wanted, func(name string, _ *ebpf.ProgramSpec) bool {
			return !slices.Contains(hooks, name)
		})
		if len(wanted) == 0 {
			continue
		}
		part := (&ebpf.CollectionSpec{
			Maps: spec.Maps, Programs: wanted, Variables: spec.Variables,
			Types: spec.Types, ByteOrder: spec.ByteOrder,
		}).Copy()
		// These only name types for generation.
		delete(part.Maps, ".bss")
		delete(part.Variables, sockVarUnusedEvent)
		delete(part.Variables, sockVarUnusedKind)
		delete(part.Variables, sockVarUnusedSleep)
		collection, err := ebpf.NewCollectionWithOptions(part, ebpf.CollectionOptions{
			MapReplacements: k.maps,
			Cache:           k.cache,
		})
		if err != nil {
			return nil, fmt.Errorf("load: %w", err)
		}
		made = append(made, closer(func() error { collection.Close(); return nil }))
		maps.Copy(specs, part.Programs)
		maps.Copy(programs, collection.Programs)
	}
	var counted []*ebpf.Program
	for _, hook := range hooks {
		program, spec := programs[hook], specs[hook]
		if program == nil {
			return nil, fmt.Errorf("%s: %w", hook, errNoHook)
		}
		l, err := k.attachProgram(program, spec)
		if hook == "tcp_inet6_hash" && errors.Is(err, os.ErrNotExist) {
			continue // since Linux 6.18 both families go through inet_hash
		}
		if err != nil {
			return nil, fmt.Errorf("attach %s to %s: %w", hook, spec.AttachTo, err)
		}
		made = append(made, l)
		counted = append(counted, program)
		if it, ok := l.(*link.Iter); ok {
			k.explicit = it
		}
	}
	k.programs = append(k.programs, counted...)
	slices.Reverse(made)
	return made, nil
}

// needKprobes reads their object if one of the hooks is in it: most kernels need
// none of them.
func (k *kernel) needKprobes(hooks []string) error {
	if len(k.specs) > 1 || !slices.ContainsFunc(hooks, func(h string) bool { return k.specs[0].Programs[h] == nil }) {
		return nil
	}
	spec, err := loadKprobes()
	if spec == nil || err != nil {
		return err
	}
	return k.configure(spec)
}

func (k *kernel) attachProgram(p *ebpf.Program, spec *ebpf.ProgramSpec) (link.Link, error) {
	switch spec.Type {
	case ebpf.Tracing:
		if spec.AttachType == ebpf.AttachTraceIter {
			return link.AttachIter(link.IterOptions{Program: p})
		}
		return link.AttachTracing(link.TracingOptions{Program: p, AttachType: spec.AttachType})
	case ebpf.Kprobe:
		if strings.HasPrefix(spec.SectionName, "kretprobe/") {
			return link.Kretprobe(spec.AttachTo, p, nil)
		}
		return link.Kprobe(spec.AttachTo, p, nil)
	case ebpf.CGroupSock, ebpf.CGroupSockAddr:
		if k.cgroup == "" {
			root, err := cgroupRoot()
			if err != nil {
				return nil, err
			}
			k.cgroup = root
		}
		return link.AttachCgroup(link.CgroupOptions{Path: k.cgroup, Attach: spec.AttachType, Program: p})
	}
	return nil, fmt.Errorf("program type %v: %w", spec.Type, errors.ErrUnsupported)
}

// settle frees what only attaching needs.
func (k *kernel) settle() {
	k.cache = nil
	k.specs = nil
}

// misses returns how many times a hook was skipped because it was running on
// the same CPU already. Such an event is lost like one that finds the ring full.
func (k *kernel) misses() (n uint64) {
	for _, p := range k.programs {
		if s, err := p.Stats(); err == nil {
			n += s.RecursionMisses
		}
	}
	return n
}

// losses returns how many events found the ring full.
func (k *kernel) losses() (n uint64) {
	var perCPU []uint64
	if err := k.maps[sockMapLosses].Lookup(uint32(0), &perCPU); err != nil {
		return 0
	}
	for _, v := range perCPU {
		n += v
	}
	return n
}

// track lets the hooks report the end of a socket.
func (k *kernel) track(cookie uint64) error {
	return k.maps[sockMapTracked].Put(cookie, uint8(1))
}

// untrack forgets a socket whose end no hook reported.
func (k *kernel) untrack(cookie uint64) {
	_ = k.maps[sockMapTracked].Delete(cookie)
}

// trackable is how many sockets the hooks can know.
func (k *kernel) trackable() int { return int(k.maps[sockMapTracked].MaxEntries()) }

// explicitUDP returns the cookies of the UDP sockets in netns that were bound to
// an address or a port.
func (k *kernel) explicitUDP(netns *namespace) (map[uint64]struct{}, error) {
	cookies := make(map[uint64]struct{})
	err := netns.do(func() error {
		it, err := k.explicit.Open()
		if err != nil {
			return err
		}
		defer func() { _ = it.Close() }()
		b, err := io.ReadAll(it)
		if err != nil {
			return err
		}
		for ; len(b) >= 8; b = b[8:] {
			cookies[binary.NativeEndian.Uint64(b)] = struct{}{}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("iterate udp sockets: %w", err)
	}
	return cookies, nil
}

func (k *kernel) close() error {
	var errs []error
	for _, m := range k.maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

type closer func() error

func (c closer) Close() error { return c() }

type closers []io.Closer

// Close closes all, in order.
func (c closers) Close() error {
	var errs []error
	for _, one := range c {
		errs = append(errs, one.Close())
	}
	return errors.Join(errs...)
}
