// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// tracer is an instance of the kernel's tracer, with probes in one program. It mounts
// nothing that others see.
type tracer struct {
	root   int    // of the tracer's file system
	name   string // of the instance, and of the group of probes
	probes int    // that were made
}

// newTracer puts a probe at the call of each stage in a program that is not stripped. The
// caller closes it.
func newTracer(program, name string) (_ *tracer, err error) {
	t := &tracer{root: -1, name: name}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("trace %s: %w", program, err), t.close())
		}
	}()
	if t.root, err = openTracefs(); err != nil {
		return nil, err
	}
	if err := unix.Mkdirat(t.root, "instances/"+name, 0o700); err != nil {
		return nil, fmt.Errorf("instance: %w", err)
	}
	offsets, err := functionOffsets(program)
	if err != nil {
		return nil, err
	}
	for i, st := range stages() {
		if st.call == "" {
			continue
		}
		at, ok := offsets[module+st.call]
		if !ok {
			return nil, fmt.Errorf("it has no function %s", st.call)
		}
		if err := t.write("uprobe_events", fmt.Sprintf("p:%s/s%d %s:%#x", name, i, program, at), unix.O_APPEND); err != nil {
			return nil, err
		}
		t.probes++
	}
	for _, s := range [][2]string{
		{"trace_clock", "mono"},
		{"buffer_size_kb", "4096"},
		{"events/sock/inet_sock_set_state/filter", "newstate == 10"}, // TCP_LISTEN
		{"events/sock/inet_sock_set_state/enable", "1"},
		{"events/" + name + "/enable", "1"},
	} {
		if err := t.write("instances/"+name+"/"+s[0], s[1], unix.O_TRUNC); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// openTracefs returns a directory of the tracer's file system.
func openTracefs() (int, error) {
	fs, err := unix.Fsopen("tracefs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("tracefs: %w", err)
	}
	defer func() { _ = unix.Close(fs) }()
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("tracefs: %w", err)
	}
	root, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("tracefs: mount: %w", err)
	}
	return root, nil
}

// functionOffsets returns where functions begin in the file of a program.
func functionOffsets(program string) (map[string]uint64, error) {
	f, err := elf.Open(program)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	symbols, err := f.Symbols()
	if err != nil {
		return nil, err
	}
	at := make(map[string]uint64)
	for _, s := range symbols {
		i := slices.IndexFunc(f.Progs, func(p *elf.Prog) bool {
			return p.Type == elf.PT_LOAD && s.Value >= p.Vaddr && s.Value < p.Vaddr+p.Filesz
		})
		if i >= 0 && elf.ST_TYPE(s.Info) == elf.STT_FUNC {
			at[s.Name] = s.Value - f.Progs[i].Vaddr + f.Progs[i].Off
		}
	}
	return at, nil
}

func (t *tracer) write(file, text string, flags int) error {
	fd, err := unix.Openat(t.root, file, unix.O_WRONLY|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if _, err := unix.Write(fd, []byte(text+"\n")); err != nil {
		return fmt.Errorf("%s: write %q: %w", file, text, err)
	}
	return nil
}

// hitLine is a line of the trace: when, which probe, and what of the kernel's own event.
var hitLine = regexp.MustCompile(` (\d+)\.(\d{6}): (?:s(\d+)|inet_sock_set_state): (?:.* sport=(\d+))?`)

// read returns what was traced, in order of time.
func (t *tracer) read() ([]hit, error) {
	fd, err := unix.Openat(t.root, "instances/"+t.name+"/trace", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	f := os.NewFile(uintptr(fd), "trace")
	defer func() { _ = f.Close() }()
	return readHits(f)
}

func readHits(r io.Reader) (hits []hit, err error) {
	in := bufio.NewScanner(r)
	for in.Scan() {
		m := hitLine.FindStringSubmatch(in.Text())
		if m == nil {
			continue // of the head
		}
		number := func(i int) int64 { n, _ := strconv.ParseInt(m[i], 10, 64); return n } // all digits, or empty
		at := time.Duration(number(1))*time.Second + time.Duration(number(2))*time.Microsecond
		hits = append(hits, hit{int(number(3)), uint16(number(4)), at})
	}
	slices.SortStableFunc(hits, func(a, b hit) int { return cmp.Compare(a.at, b.at) })
	return hits, in.Err()
}

// close removes the probes and the instance.
func (t *tracer) close() error {
	if t.root < 0 {
		return nil
	}
	var errs []error
	if err := unix.Unlinkat(t.root, "instances/"+t.name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		errs = append(errs, fmt.Errorf("remove the instance %s: %w", t.name, err))
	}
	if t.probes > 0 {
		errs = append(errs, t.write("uprobe_events", "-:"+t.name+"/", unix.O_APPEND))
	}
	return errors.Join(append(errs, unix.Close(t.root))...)
}
