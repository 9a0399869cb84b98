// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package forward

import (
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Beyond a user's share of memory for pipes the kernel makes small ones. These are
// slower than copying, and are not used.
func TestSmallPipesAreNotUsed(t *testing.T) {
	const child = "FAIRLEAD_TEST_SMALL_PIPES"
	if os.Getenv(child) == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestSmallPipesAreNotUsed$", "-test.v")
		cmd.Env, cmd.Dir = append(os.Environ(), child+"=1"), "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 64_123, Gid: 64_123}}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("as an ordinary user: %v\n%s", err, out)
		}
		return
	}
	for range 256 { // a mebibyte each
		var fds [2]int
		if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, 1<<20); err != nil {
			if p := newPipe(); p != nil {
				t.Errorf("newPipe returned a pipe of %d bytes", sizeOf(p.w))
			}
			return
		}
	}
	t.Fatal("an ordinary user has no share here: fs.pipe-user-pages-soft is 0 or very large")
}
