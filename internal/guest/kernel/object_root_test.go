// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package kernel

import (
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
)

func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// withoutExit is the file of NAT hooks, in which the function of one does not exist.
func withoutExit() (*ebpf.CollectionSpec, error) {
	spec, err := bpf.LoadNat()
	if err == nil {
		spec.Programs[bpf.NatProgLegacyExit].AttachTo = "syscalls/no_such_call"
	}
	return spec, err
}

// TestAttachRollsBack attaches one hook, and another whose function does not exist.
func TestAttachRollsBack(t *testing.T) {
	o, err := Open(nil, Config{Files: []File{withoutExit}, Maps: []string{bpf.NatMapReplacements}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
	}()
	before := descriptors(t)
	if err := o.Attach([]string{bpf.NatProgLegacyEnter, bpf.NatProgLegacyExit}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("attach: %v, want %v", err, os.ErrNotExist)
	}
	if err := o.Attach([]string{bpf.NatProgLegacyEnter, "no_such_hook"}); !errors.Is(err, errNoHook) {
		t.Errorf("attach: %v, want %v", err, errNoHook)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors after, %d before", after, before)
	}
	if len(o.programs) != 0 {
		t.Errorf("%d programs count as attached", len(o.programs))
	}
}

// TestOptionalHook leaves out a hook whose function does not exist.
func TestOptionalHook(t *testing.T) {
	o, err := Open(nil, Config{Files: []File{withoutExit}, Optional: []string{bpf.NatProgLegacyExit}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	if err := o.Attach([]string{bpf.NatProgLegacyEnter, bpf.NatProgLegacyExit}); err != nil || len(o.programs) != 1 {
		t.Errorf("%d hooks, %v; want one", len(o.programs), err)
	}
}

// What a hook attaches to and the kernel does not have is named, whichever way it attaches.
func TestAbsentFunctionIsNamed(t *testing.T) {
	hooks := map[string]File{bpf.NatProgLegacyFexit: bpf.LoadNat, bpf.SockProgTcpState: bpf.LoadSock}
	if _, err := os.Stat("/sys/bus/event_source/devices/kprobe"); err == nil {
		hooks[bpf.NatProgLegacyKprobe] = bpf.LoadNat
	}
	for hook, load := range hooks {
		t.Run(hook, func(t *testing.T) {
			absent := func() (*ebpf.CollectionSpec, error) {
				spec, err := load()
				if err == nil {
					spec.Programs[hook].AttachTo = "no_such_function"
				}
				return spec, err
			}
			o, err := Open(nil, Config{Files: []File{absent}})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = o.Close() }()
			if err := o.Attach([]string{hook}); Why(err).Absent != "no_such_function" {
				t.Errorf("%v: %+v", err, Why(err))
			}
		})
	}
}

func TestHasFunction(t *testing.T) {
	o, err := Open(nil, Config{Files: []File{bpf.LoadNat}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	if !o.Has("inet_bind") || o.Has("no_such_function") {
		t.Errorf("inet_bind: %v, no_such_function: %v", o.Has("inet_bind"), o.Has("no_such_function"))
	}
}

// What the kernel refuses for one trampoline is not tried for the others that share the types.
func TestRefusedTrampolineIsTriedOnce(t *testing.T) {
	types := &Types{refused: errRefused}
	o, err := Open(types, Config{Files: []File{bpf.LoadNat}, Maps: []string{bpf.NatMapReplacements}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	if err := o.Attach([]string{bpf.NatProgLegacyFexit}); !errors.Is(err, errRefused) {
		t.Errorf("attach: %v, want %v", err, errRefused)
	}
	if err := o.Attach([]string{bpf.NatProgLegacyEnter}); errors.Is(err, errRefused) {
		t.Errorf("attach without a trampoline: %v", err)
	}
}
