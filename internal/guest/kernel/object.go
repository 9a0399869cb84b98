// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// File reads a BPF object file.
type File func() (*ebpf.CollectionSpec, error)

// Config describes an Object.
type Config struct {
	// Files are object files, as bpf.LoadSock. The first is always read, each
	// other only for a hook that is in none before it.
	Files []File

	// Constants are set in the programs, by name.
	Constants map[string]any

	// Maps are those that Go code reads or writes, from the first file. They
	// exist from Open to Close and are shared by all hooks. All other maps belong
	// to the hooks that were attached together.
	Maps []string

	// Sizes replace the number of entries of Maps (bytes of a ring buffer), by name.
	Sizes map[string]uint32

	// Optional are hooks that are left out if the kernel lacks their function.
	Optional []string
}

// Object is BPF programs and maps in the kernel. Close frees all of it. One
// goroutine uses it; Close, Misses and what Map returns are for any.
type Object struct {
	config   Config
	types    *Types
	ownTypes bool
	files    []*ebpf.CollectionSpec // those that were read

	maps      map[string]*ebpf.Map
	programs  []*ebpf.Program // attached
	iterators map[string]*link.Iter
	filters   map[string]*ebpf.Program // of sockets
	cgroup    string                   // where the hierarchy is mounted, "" until asked for
	made      closers                  // in the order of making
	close     func() error
}

// errRefused is EPERM without the name and the log of one program.
var errRefused = fmt.Errorf("as for another trampoline: %w", unix.EPERM)

var errNoHook = errors.New("no such hook in this build")

// Open makes the maps of an object. It attaches nothing. types may be nil. The
// caller calls Close.
func Open(types *Types, c Config) (*Object, error) {
	o := &Object{
		config: c, types: types, maps: make(map[string]*ebpf.Map), iterators: make(map[string]*link.Iter),
		filters: make(map[string]*ebpf.Program),
	}
	if types == nil {
		o.types, o.ownTypes = new(Types), true
	}
	o.close = sync.OnceValue(func() error { return o.made.closeReversed() })
	if err := o.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("bpf: %w", err), o.Close())
	}
	return o, nil
}

func (o *Object) open() error {
	// Before Linux 5.11 maps count against a limit that is far too low.
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("%w: %v", ErrMemlock, err) //nolint:errorlint // more than a lack of privileges for BPF
	}
	if err := o.readFile(); err != nil {
		return err
	}
	for _, name := range o.config.Maps {
		m, err := ebpf.NewMap(o.files[0].Maps[name])
		if err != nil {
			return fmt.Errorf("make map %s: %w", name, err)
		}
		o.maps[name] = m
		o.made = append(o.made, m)
	}
	return nil
}

// readFile reads and configures the next object file.
func (o *Object) readFile() error {
	spec, err := o.config.Files[len(o.files)]()
	if err != nil {
		return err
	}
	for name, value := range o.config.Constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("configure: %w", err)
		}
	}
	for name, entries := range o.config.Sizes {
		spec.Maps[name].MaxEntries = entries
	}
	o.files = append(o.files, spec)
	return nil
}

// FinishAttach frees what only Attach needs.
func (o *Object) FinishAttach() {
	o.files = nil
	if o.ownTypes {
		o.types.Forget()
	}
}

// Close detaches all hooks and frees all maps. It also ends reads of Readers. It
// may be called more than once, from any goroutine.
func (o *Object) Close() error { return o.close() }

// Map returns one of Config.Maps.
func (o *Object) Map(name string) *ebpf.Map { return o.maps[name] }

// Misses returns how many times a hook was skipped because it was running on the
// same CPU already.
func (o *Object) Misses() (n uint64) {
	for _, p := range o.programs {
		if s, err := p.Stats(); err == nil {
			n += s.RecursionMisses
		}
	}
	return n
}

// Iterate runs an attached iterator in the network namespace of the calling
// thread and returns its output.
func (o *Object) Iterate(hook string) ([]byte, error) {
	it, err := o.iterators[hook].Open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = it.Close() }()
	return io.ReadAll(it)
}

// FilterSocket attaches a filter that Attach has loaded to a socket. The socket keeps it.
func (o *Object) FilterSocket(filter string, socket syscall.Conn) error {
	return link.AttachSocketFilter(socket, o.filters[filter])
}

// Attach loads the hooks and attaches them in order. If one fails it detaches
// those before it.
func (o *Object) Attach(hooks []string) error {
	if err := o.find(hooks); err != nil {
		return err
	}
	return o.types.lend(func(types *btf.Cache) error { return o.attachAll(hooks, types) })
}

// Has reports whether the kernel is known to have a function, by its types.
func (o *Object) Has(function string) (has bool) {
	_ = o.types.lend(func(types *btf.Cache) error {
		_, has = hasType(types, function)
		return nil
	})
	return has
}

// find reads files until it has all hooks.
func (o *Object) find(hooks []string) error {
	for _, hook := range hooks {
		for !slices.ContainsFunc(o.files, func(s *ebpf.CollectionSpec) bool { return s.Programs[hook] != nil }) {
			if len(o.files) == len(o.config.Files) {
				return fmt.Errorf("%s: %w", hook, errNoHook)
			}
			if err := o.readFile(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (o *Object) attachAll(hooks []string, types *btf.Cache) (err error) {
	var made closers
	defer func() {
		if err != nil {
			err = errors.Join(err, made.closeReversed())
		}
	}()
	specs := make(map[string]*ebpf.ProgramSpec)
	programs := make(map[string]*ebpf.Program)
	for _, file := range o.files {
		part := choose(file, hooks)
		if len(part.Programs) == 0 {
			continue
		}
		collection, err := o.load(part, types)
		if err != nil {
			return fmt.Errorf("load: %w", err)
		}
		made = append(made, closer(func() error { collection.Close(); return nil }))
		maps.Copy(specs, part.Programs)
		maps.Copy(programs, collection.Programs)
	}
	var attached []*ebpf.Program
	for _, hook := range hooks {
		on, err := o.attach(programs[hook], specs[hook])
		if errors.Is(err, os.ErrNotExist) && slices.Contains(o.config.Optional, hook) {
			continue
		}
		if err != nil {
			if specs[hook].Type == ebpf.Kprobe && errors.Is(err, os.ErrNotExist) {
				err = &AbsentError{Target: specs[hook].AttachTo, Err: err}
			}
			return fmt.Errorf("attach %s to %s: %w", hook, specs[hook].AttachTo, err)
		}
		made = append(made, on)
		attached = append(attached, programs[hook])
		if it, ok := on.(*link.Iter); ok {
			o.iterators[hook] = it
		}
	}
	o.programs = append(o.programs, attached...)
	o.made = append(o.made, made...)
	return nil
}

// choose returns the part of a file that the hooks in it need.
func choose(file *ebpf.CollectionSpec, hooks []string) *ebpf.CollectionSpec {
	part := &ebpf.CollectionSpec{
		Maps: make(map[string]*ebpf.MapSpec), Variables: maps.Clone(file.Variables),
		Programs: maps.Clone(file.Programs), Types: file.Types, ByteOrder: file.ByteOrder,
	}
	maps.DeleteFunc(part.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !slices.Contains(hooks, name) })
	for _, p := range part.Programs {
		for i := range p.Instructions {
			if ins := &p.Instructions[i]; ins.IsLoadFromMap() {
				part.Maps[ins.Reference()] = file.Maps[ins.Reference()]
			}
		}
	}
	maps.DeleteFunc(part.Variables, func(_ string, v *ebpf.VariableSpec) bool { return part.Maps[v.SectionName] == nil })
	return part.Copy()
}

// load loads programs. o.types are lent to the caller.
func (o *Object) load(part *ebpf.CollectionSpec, types *btf.Cache) (*ebpf.Collection, error) {
	// Loading takes 0.1 s, in vain if the kernel cannot attach what is loaded.
	programs := slices.Collect(maps.Values(part.Programs))
	trampolines := slices.ContainsFunc(programs, byTrampoline)
	if trampolines {
		if o.types.refused != nil {
			return nil, o.types.refused
		}
		if err := mayHang(types); err != nil {
			return nil, err
		}
	}
	if slices.ContainsFunc(programs, func(p *ebpf.ProgramSpec) bool { return p.Type == ebpf.Kprobe }) {
		if _, err := os.Stat("/sys/bus/event_source/devices/kprobe"); err != nil {
			return nil, fmt.Errorf("kprobes: %w", err)
		}
	}
	shared := maps.Clone(o.maps)
	maps.DeleteFunc(shared, func(name string, _ *ebpf.Map) bool { return part.Maps[name] == nil })
	collection, err := ebpf.NewCollectionWithOptions(part, ebpf.CollectionOptions{MapReplacements: shared, Cache: types})
	if errors.Is(err, ebpf.ErrNotSupported) {
		if target := absent(part, types); target != "" {
			err = &AbsentError{Target: target, Err: err}
		}
	}
	// Not EACCES, by which the verifier refuses one program.
	if trampolines && errors.Is(err, unix.EPERM) {
		o.types.refused = errRefused
	}
	return collection, err
}

// absent returns what a program attaches to and the kernel's own types do not have, "" if
// they have all or there are none.
func absent(part *ebpf.CollectionSpec, types *btf.Cache) string {
	for _, name := range slices.Sorted(maps.Keys(part.Programs)) {
		p := part.Programs[name]
		if p.Type != ebpf.Tracing {
			continue
		}
		of := p.AttachTo
		switch p.AttachType {
		case ebpf.AttachTraceRawTp:
			of = "btf_trace_" + of
		case ebpf.AttachTraceIter:
			of = "bpf_iter_" + of
		}
		if known, has := hasType(types, of); known && !has {
			return p.AttachTo
		}
	}
	return ""
}

// hasType reports whether the kernel's own types are known, and whether one has that name.
func hasType(types *btf.Cache, name string) (known, has bool) {
	kernel, err := types.Kernel()
	if err != nil {
		return false, false
	}
	_, err = kernel.AnyTypeByName(name)
	return true, !errors.Is(err, btf.ErrNotFound)
}

func (o *Object) attach(p *ebpf.Program, spec *ebpf.ProgramSpec) (io.Closer, error) {
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
	case ebpf.TracePoint:
		return attachTracepoint(spec.AttachTo, p)
	case ebpf.SocketFilter:
		o.filters[spec.Name] = p
		return closer(func() error { return nil }), nil // each socket is attached to by FilterSocket
	case ebpf.CGroupSock, ebpf.CGroupSockAddr:
		if o.cgroup == "" {
			root, err := cgroupRoot()
			if err != nil {
				return nil, err
			}
			o.cgroup = root
		}
		return link.AttachCgroup(link.CgroupOptions{Path: o.cgroup, Attach: spec.AttachType, Program: p})
	}
	return nil, fmt.Errorf("program type %v: %w", spec.Type, errors.ErrUnsupported)
}

type closer func() error

func (c closer) Close() error { return c() }

type closers []io.Closer

// closeReversed closes all, the last one first.
func (c closers) closeReversed() error {
	var errs []error
	for _, one := range slices.Backward(c) {
		errs = append(errs, one.Close())
	}
	return errors.Join(errs...)
}
