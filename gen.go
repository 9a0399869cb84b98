// SPDX-License-Identifier: Apache-2.0

// Package fairlead is the root of the module and holds what `go generate .`
// makes: the BPF objects of internal/guest/kernel/bpf from the sources in bpf/. The
// output is committed, so that building needs no C compiler.
//
// hack/bpf2go.sh pins the compiler to Debian 12's clang-14 and llvm-strip-14, so
// that the same source gives the same bytes; hack/generate-check.sh verifies it.
package fairlead

//go:generate hack/bpf2go.sh -target bpfel -type event -type event_kind -type sleep -type control -type group Sock bpf/sock.bpf.c
//go:generate hack/bpf2go.sh -target amd64,arm64 -no-global-types -output-stem sock_kprobe SockKprobe bpf/sock_kprobe.bpf.c
//go:generate hack/bpf2go.sh -target bpfel -no-global-types Nat bpf/nat.bpf.c
//go:generate hack/bpf2go.sh -target bpfel -type followed_table -type filter_state Nft bpf/nft.bpf.c
//go:generate hack/bpf2go.sh -target bpfel -no-global-types Refused bpf/refused.bpf.c
