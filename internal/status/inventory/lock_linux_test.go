// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestLockNode(t *testing.T) {
	node := strings.Repeat("n", 240) + fmt.Sprint(os.Getpid()) // as long as a name may be
	release, err := LockNode(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	for range 300 { // more than the queue of a socket
		if _, err := LockNode(t.Context(), node); !errors.Is(err, ErrHeld) {
			t.Fatalf("the second agent: %v", err)
		}
	}
	other, err := LockNode(t.Context(), node[1:])
	if err != nil {
		t.Fatalf("the agent of another node: %v", err)
	}
	other()
	release()
	wait.Until(t, "the lock is free", func() error {
		release, err := LockNode(t.Context(), node)
		if err == nil {
			release()
		}
		return err
	})
}

// lockVariable names the node whose lock a process of this test holds until it is killed.
const lockVariable = "FAIRLEAD_TEST_LOCK"

// The kernel releases the lock of an agent that is killed before anybody can see that it
// has ended.
func TestLockOfAKilledAgent(t *testing.T) {
	if node := os.Getenv(lockVariable); node != "" {
		_, err := LockNode(t.Context(), node)
		fmt.Println("lock:", err)
		_, _ = os.Stdin.Read(make([]byte, 1)) // until it is killed, or the test has ended
		return
	}
	node := fmt.Sprint("killed-", os.Getpid())
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	holder := exec.CommandContext(t.Context(), self, "-test.run=^TestLockOfAKilledAgent$")
	holder.Env = append(os.Environ(), lockVariable+"="+node)
	if _, err := holder.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "lock: <nil>\n" {
		t.Fatalf("the holder says %q, %v", line, err)
	}
	if _, err := LockNode(t.Context(), node); !errors.Is(err, ErrHeld) {
		t.Errorf("beside the holder: %v", err)
	}
	_ = holder.Process.Kill()
	_ = holder.Wait()
	release, err := LockNode(t.Context(), node)
	if err != nil {
		t.Fatalf("after the holder was killed: %v", err)
	}
	release()
}

func TestThisMachine(t *testing.T) {
	boot, namespace, err := ThisMachine()
	if err != nil || len(boot) != 36 || strings.Trim(namespace, "0123456789") != "" || namespace == "" {
		t.Errorf("boot %q, namespace %q, %v", boot, namespace, err)
	}
}
