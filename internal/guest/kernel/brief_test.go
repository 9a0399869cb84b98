// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
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
	absent := fmt.Errorf("kprobe: attach tcp_inet_hash to inet_hash: %w", &AbsentError{Target: "inet_hash", Err: syscall.ENOENT})
	memlock := fmt.Errorf("bpf: %w", fmt.Errorf("%w: %v", ErrMemlock, syscall.EPERM))
	for want, err := range map[string]error{
		"":                                nil,
		"fentry: operation not permitted": load,
		"fentry: operation not permitted; kprobe: no tracefs": errors.Join(load, attach),
		"kprobe: no tracefs":                            fmt.Errorf("kprobe: %w", errors.Join(attach, load)),
		"fentry: unknown func bpf_get_socket_cookie#46": unknown,
		"fentry: invalid argument":                      silent,
		"kprobe: the kernel has no inet_hash":           absent,
		"bpf: " + ErrMemlock.Error():                    memlock,
		"no BPF":                                        errors.New("no BPF"),
	} {
		if got := Brief(err); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Of what several methods failed by, each part is found.
func TestWhyFindsEachReason(t *testing.T) {
	absent := fmt.Errorf("fentry: load: %w", &AbsentError{Target: "inet_hash", Err: ebpf.ErrNotSupported})
	refused := fmt.Errorf("kprobe: %w", &ebpf.VerifierError{Cause: syscall.EINVAL, Log: []string{"\tunknown func x#46", "processed 5 insns"}})
	memlock := fmt.Errorf("bpf: %w", ErrMemlock)
	for _, v := range []struct {
		err  error
		want Reason
	}{
		{nil, Reason{}},
		{syscall.EPERM, Reason{}},
		{absent, Reason{Absent: "inet_hash"}},
		{refused, Reason{Verdict: "unknown func x#46"}},
		{memlock, Reason{Memlock: true}},
		{fmt.Errorf("fentry: %w", ErrHang), Reason{Hang: true}},
		{errors.Join(absent, refused), Reason{Absent: "inet_hash", Verdict: "unknown func x#46"}},
	} {
		if got := Why(v.err); got != v.want {
			t.Errorf("%v: got %+v, want %+v", v.err, got, v.want)
		}
	}
	if !errors.Is(absent, ebpf.ErrNotSupported) {
		t.Error("the kernel's error is not kept")
	}
}

func TestMethodInLogHasNoEmptyAttributes(t *testing.T) {
	for want, m := range map[string]Method{
		"level=INFO msg=m method=iter\n":                           {Name: MethodIter},
		"level=INFO msg=m capability=udp-dump method=iter\n":       {Capability: "udp-dump", Name: MethodIter},
		"level=INFO msg=m method=audit lost=peers\n":               {Name: "audit", Lost: "peers"},
		"level=INFO msg=m method=audit better=\"no BPF\"\n":        {Name: "audit", Err: errors.New("no BPF")},
		"level=INFO msg=m method=audit lost=peers better=fentry\n": {Name: "audit", Lost: "peers", Err: errors.New("fentry")},
	} {
		var b bytes.Buffer
		h := slog.NewTextHandler(&b, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})
		slog.New(h).Info("m", m.LogAttr())
		if b.String() != want {
			t.Errorf("got %q, want %q", b.String(), want)
		}
	}
}
