// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// accelerator is what executes the instructions of a machine.
type accelerator struct {
	name    string
	options string // of QEMU
	cpu     string
	why     string // for a human
}

var virtual = accelerator{name: "kvm", options: "kvm", cpu: "host"}

// emulated has one thread for all virtual processors: with more, attaching programs under
// load breaks in the emulator.
func emulated(arch architecture) accelerator {
	return accelerator{name: "tcg", options: "tcg,thread=single", cpu: arch.cpu}
}

// probeLimit is how long a machine under KVM may take to boot and power off, which is
// a second or two where KVM works.
const probeLimit = 15 * time.Second

// chooseAccelerator returns the accelerator that o asks for. "auto" is KVM if a kernel
// boots and ends under it: a /dev/kvm that can be opened may still belong to a
// hypervisor that cannot run guests.
func chooseAccelerator(ctx context.Context, o options, arch architecture, cache, work, version string) (accelerator, error) {
	switch {
	case o.accel == "kvm":
		return virtual, nil
	case o.accel == "tcg" || !arch.native():
		return emulated(arch), nil
	}
	start := time.Now()
	accel, err := virtual, probeKVM(ctx, arch, cache, work, version)
	if err != nil {
		accel = emulated(arch)
		accel.why = fmt.Sprintf("kvm does not work: after %.1fs: %s", time.Since(start).Seconds(), firstLine(err))
	}
	return accel, context.Cause(ctx)
}

// probeKVM boots a machine without jobs under KVM.
func probeKVM(ctx context.Context, arch architecture, cache, work, version string) error {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	f.Close()
	k, err := findKernel(cache, version, arch)
	if err != nil {
		return err
	}
	base, err := baseImage(ctx, cache, k)
	if err != nil {
		return err
	}
	dir := filepath.Join(work, "probe")
	if err := os.MkdirAll(filepath.Join(dir, "test"), 0o755); err != nil {
		return err
	}
	initrd := filepath.Join(dir, "initrd")
	if err := appendImage(initrd, base, dir, k, script(k, nil)); err != nil {
		return fmt.Errorf("pack probe: %w", err)
	}
	m := machine{kernel: k, initrd: initrd, memory: minMemory, cpus: defaultCPUs, accel: virtual, timeout: probeLimit, console: &console{}}
	return errors.Join(m.boot(ctx), m.console.err())
}
