// SPDX-License-Identifier: Apache-2.0

// Package hvsock connects a Windows host to a port of a Linux virtual machine
// over Hyper-V sockets: the guest listens on a vsock port, the host names the
// machine by its id, which changes each time that the machine starts.
package hvsock

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
)

// GUID is a GUID as Windows stores it: the first three fields little endian.
type GUID [16]byte

// ParseGUID reads "e0e16197-dd56-4a10-9195-5ee7a155a838", in braces or not.
func ParseGUID(s string) (GUID, error) {
	text := s
	if inner, ok := strings.CutPrefix(s, "{"); ok {
		if text, ok = strings.CutSuffix(inner, "}"); !ok {
			return GUID{}, fmt.Errorf("%q: want a GUID", s)
		}
	}
	b, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	if err != nil || len(b) != 16 || len(text) != 36 || text[8] != '-' || text[13] != '-' || text[18] != '-' || text[23] != '-' {
		return GUID{}, fmt.Errorf("%q: want a GUID such as e0e16197-dd56-4a10-9195-5ee7a155a838", s)
	}
	slices.Reverse(b[0:4])
	slices.Reverse(b[4:6])
	slices.Reverse(b[6:8])
	return GUID(b), nil
}

// String returns the GUID without braces, in lower case.
func (g GUID) String() string {
	return fmt.Sprintf("%08x-%04x-%04x-%x-%x", binary.LittleEndian.Uint32(g[0:]),
		binary.LittleEndian.Uint16(g[4:]), binary.LittleEndian.Uint16(g[6:]), g[8:10], g[10:])
}

// ServiceID returns the Hyper-V service of a vsock port of a Linux
// guest: the template 00000000-facb-11e6-bd58-64006a7986d3 with the port in its
// first field (HV_GUID_VSOCK_TEMPLATE in hvsocket.h).
func ServiceID(port uint32) GUID {
	g := GUID{0, 0, 0, 0, 0xcb, 0xfa, 0xe6, 0x11, 0xbd, 0x58, 0x64, 0x00, 0x6a, 0x79, 0x86, 0xd3}
	binary.LittleEndian.PutUint32(g[:], port)
	return g
}

// System is what Windows reports of its virtual machines.
type System interface {
	// Machines returns the ids of the machines that run.
	Machines(ctx context.Context) ([]GUID, error)
	// WSL returns what wsl.exe prints with these arguments.
	WSL(ctx context.Context, args ...string) ([]byte, error)
	// Connect connects to a service of a machine.
	Connect(ctx context.Context, machine, service GUID) (net.Conn, error)
}

// ErrNotRunning is returned while the machine does not run. It is never started
// from here.
var ErrNotRunning = errors.New("not running")

// Dialer connects to one machine, whatever its id is now. It is safe for
// concurrent use.
type Dialer struct {
	system System
	fixed  GUID // zero: the machine of WSL 2
	port   uint32

	known chan knowledge // capacity one: a lock
}

// knowledge is which of the machines that were running was that of WSL.
type knowledge struct {
	running []GUID
	machine GUID
}

// NewDialer returns a dialer of a vsock port of a machine: "wsl" for the machine
// in which WSL 2 runs its distributions, else its id.
func NewDialer(system System, machine string, port uint32) (*Dialer, error) {
	d := &Dialer{system: system, port: port, known: make(chan knowledge, 1)}
	if machine != WSL {
		id, err := ParseGUID(machine)
		if err != nil {
			return nil, fmt.Errorf("virtual machine %w, or %q", err, WSL)
		}
		d.fixed = id
	}
	d.known <- knowledge{}
	return d, nil
}

// WSL names the machine of WSL 2 instead of an id.
const WSL = "wsl"

// Dial connects. A machine that was restarted is found under its new id. Again
// connects to the same machine once more, without looking for it.
func (d *Dialer) Dial(ctx context.Context) (conn net.Conn, again func(context.Context) (net.Conn, error), err error) {
	machines, err := d.machines(ctx)
	if err != nil {
		return nil, nil, err
	}
	var errs []error
	for _, m := range machines {
		again := func(ctx context.Context) (net.Conn, error) { return d.system.Connect(ctx, m, ServiceID(d.port)) }
		conn, err := again(ctx)
		if err == nil {
			return conn, again, nil
		}
		errs = append(errs, fmt.Errorf("machine %s: %w", m, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, nil, errors.Join(errs...)
}

// machines returns the machine to connect to, or several to be tried.
func (d *Dialer) machines(ctx context.Context) ([]GUID, error) {
	if d.fixed != (GUID{}) {
		return []GUID{d.fixed}, nil
	}
	var known knowledge
	select {
	case known = <-d.known:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { d.known <- known }()
	running, err := d.system.Machines(ctx)
	switch {
	case err != nil:
		running = nil // wsl.exe may find it
	case len(running) == 0:
		known = knowledge{}
		return nil, fmt.Errorf("WSL is %w: no virtual machine runs", ErrNotRunning)
	case known.machine != (GUID{}) && slices.Equal(running, known.running):
		return []GUID{known.machine}, nil // without a process to ask
	}
	machine, werr := d.ask(ctx)
	switch {
	case werr == nil:
		known = knowledge{running, machine}
		return []GUID{machine}, nil
	case errors.Is(werr, ErrNotRunning):
		known = knowledge{}
		return nil, werr
	case len(running) > 0 && ctx.Err() == nil:
		return running, nil // the link's token proves the right one
	}
	return nil, errors.Join(werr, err)
}

// ask asks WSL. Only distributions that run are asked, so that none is started.
func (d *Dialer) ask(ctx context.Context) (GUID, error) {
	out, err := d.system.WSL(ctx, "--list", "--running", "--quiet")
	names := Lines(out)
	if len(names) == 0 {
		if err != nil && len(out) == 0 {
			return GUID{}, fmt.Errorf("list the distributions of WSL that run: %w", err)
		}
		return GUID{}, fmt.Errorf("WSL is %w: no distribution runs", ErrNotRunning)
	}
	if err != nil { // its text says that there is none
		return GUID{}, fmt.Errorf("WSL is %w: %q", ErrNotRunning, strings.Join(names, " "))
	}
	var errs []error
	for _, name := range names {
		out, err := d.system.WSL(ctx, "--distribution", name, "--exec", "/bin/wslinfo", "--vm-id")
		if err != nil {
			errs = append(errs, fmt.Errorf("wslinfo --vm-id in %q: %w", name, err))
			continue
		}
		lines := Lines(out)
		if len(lines) == 0 {
			errs = append(errs, fmt.Errorf("wslinfo --vm-id in %q printed nothing", name))
			continue
		}
		id, err := ParseGUID(lines[len(lines)-1])
		if err == nil {
			return id, nil
		}
		errs = append(errs, fmt.Errorf("wslinfo --vm-id in %q: %w", name, err)) // "wsl1", or too old
	}
	return GUID{}, errors.Join(errs...)
}
