// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
)

func TestBriefKeepsFirstAndInnermostPart(t *testing.T) {
	load := fmt.Errorf("fentry: load: program tcp_listen_start: load program: %w (MEMLOCK may be too low)", syscall.EPERM)
	attach := fmt.Errorf("kprobe: attach: %w", errors.New("no tracefs\nis mounted"))
	for want, err := range map[string]error{
		"":                                nil,
		"fentry: operation not permitted": load,
		"fentry: operation not permitted; kprobe: no tracefs": errors.Join(load, attach),
		"kprobe: no tracefs": fmt.Errorf("kprobe: %w", errors.Join(attach, load)),
		"no BPF":             errors.New("no BPF"),
	} {
		if got := Brief(err); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
