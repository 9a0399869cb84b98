// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// emulator is what runs a machine within the machine, by KVM, as the emulated processor of the
// latter has SVM.
const emulator = "/usr/bin/qemu-system-x86_64"

// firmware is what the emulator loads to boot a kernel without disk and screen.
var firmware = []string{"/usr/share/seabios/bios-256k.bin", "/usr/share/qemu/kvmvapic.bin", "/usr/share/qemu/linuxboot_dma.bin"}

// nestedDir is the directory with the kernel and the initramfs of a machine within the machine.
const nestedDir = "boot"

// stageNested lays the emulator and what it loads below root.
func stageNested(root string, arch architecture) error {
	if !arch.native() {
		return fmt.Errorf("a machine within the machine: not for %s", arch.name)
	}
	libraries, err := arch.libraryFiles("/", []string{emulator})
	if err != nil {
		return fmt.Errorf("list libraries of %s: %w", emulator, err)
	}
	for _, f := range slices.Concat([]string{emulator}, firmware, libraries) {
		if err := copyFile(filepath.Join(root, f), f); err != nil {
			return fmt.Errorf("%w: run hack/provision.sh %s", err, arch.provision)
		}
	}
	return os.Mkdir(filepath.Join(root, nestedDir), 0o755)
}

// nested adds what stageNested laid below root, if it did. The machine within the machine has
// the same kernel, and the same initramfs without tests.
func (a *archive) nested(root string, k kernel, base string) error {
	if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := a.tree(root, root); err != nil {
		return err
	}
	if err := a.file(nestedDir+"/vmlinuz", 0o644, filepath.Join(k.dir, "vmlinuz")); err != nil {
		return err
	}
	return a.file(nestedDir+"/initrd", 0o644, base)
}
