// SPDX-License-Identifier: Apache-2.0

//go:build linux

package image

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// at moves a file to a descriptor that is not used.
func at(t *testing.T, f *os.File, fd int) *os.File {
	t.Helper()
	if err := unix.Dup3(int(f.Fd()), fd, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	f = os.NewFile(uintptr(fd), f.Name())
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// An image is executed whatever numbers its descriptor and those of the program's files have.
func TestCommand(t *testing.T) {
	const path, output = "/bin/true", 300
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := -2; i <= 4; i++ {
		if i == 0 {
			continue // one number is one file
		}
		null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		null = at(t, null, output)
		sealed, err := Seal(path, fmt.Sprintf("%x", sha256.Sum256(b)))
		if err != nil {
			t.Fatal(err)
		}
		sealed = at(t, sealed, output+i)
		cmd := &exec.Cmd{Args: []string{path}, Stdout: null}
		beyond, err := Command(cmd, sealed)
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Run(); err != nil {
			t.Errorf("the image at %d, the output at %d: %v", output+i, output, err)
		}
		_ = beyond.Close()
	}
}

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
