// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
)

func TestBriefKeepsFirstAndInnermostPart(t *testing.T) {
	load := fmt.Errorf("fentry: load: program tcp_listen_start: load program: %w (MEMLOCK may be too low)", syscall.EPERM)
	attach := fmt.Errorf("kprobe: attach: %w", errors.New("no tracefs\nis mounted"))
	unknown := fmt.Errorf("fentry: load: program tcp_listen_start: %w", &ebpf.VerifierError{Cause: syscall.EINVAL, Log: []string{
		"0: (bf) r6 = r1", "\tunknown func bpf_get_socket_cookie#46", "processed 5 insns (limit 1000000) max_states_per_insn 0",
	}})
	silent := fmt.Errorf("fentry: load: %w", &ebpf.VerifierError{Cause: syscall.EINVAL})
	for want, err := range map[string]error{
		"":                                nil,
		"fentry: operation not permitted": load,
		"fentry: operation not permitted; kprobe: no tracefs": errors.Join(load, attach),
		"kprobe: no tracefs":                            fmt.Errorf("kprobe: %w", errors.Join(attach, load)),
		"fentry: unknown func bpf_get_socket_cookie#46": unknown,
		"fentry: invalid argument":                      silent,
		"no BPF":                                        errors.New("no BPF"),
	} {
		if got := Brief(err); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
