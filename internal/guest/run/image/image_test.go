// SPDX-License-Identifier: Apache-2.0

//go:build linux

package image

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A copy that is held for a moment is sealed when it is free; one that stays held is an error.
func TestSealWaits(t *testing.T) {
	image, err := memory()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = image.Close() })
	if _, err := image.WriteString("program"); err != nil {
		t.Fatal(err)
	}
	held, err := unix.Mmap(int(image.Fd()), 0, 1, unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if err := seal(image, 0); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("a copy that is held: %v", err)
	}
	sealed := make(chan error)
	go func() { sealed <- seal(image, sealLimit) }()
	time.Sleep(200 * time.Millisecond) // longer than the kernel itself would wait
	if err := unix.Munmap(held); err != nil {
		t.Fatal(err)
	}
	if err := <-sealed; err != nil {
		t.Fatal(err)
	}
	if _, err := image.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("written after it was sealed: %v", err)
	}
}
