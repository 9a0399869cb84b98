// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/kit/wait"
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

func TestThisMachine(t *testing.T) {
	boot, namespace, err := ThisMachine()
	if err != nil || len(boot) != 36 || strings.Trim(namespace, "0123456789") != "" || namespace == "" {
		t.Errorf("boot %q, namespace %q, %v", boot, namespace, err)
	}
}
