// SPDX-License-Identifier: Apache-2.0

// Package fairlead is the root of the module and holds what `go generate .`
// makes: the BPF objects of internal/observer from the sources in bpf/. What
// comes out is committed, so that building needs no C compiler.
//
// The compiler is pinned to Debian 12's clang-14 and llvm-strip-14, so that the
// same source gives the same bytes; hack/generate-check.sh checks that it did.
package fairlead

//go:generate go tool bpf2go -go-package observer -output-dir internal/observer -cc clang-14 -strip llvm-strip-14 -target bpfel -type event -type event_kind -type sleep -type control sock bpf/sock.bpf.c -- -Ibpf/include -O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -mcpu=v3 -fdebug-prefix-map=$PWD=.
//go:generate go tool bpf2go -go-package observer -output-dir internal/observer -cc clang-14 -strip llvm-strip-14 -target amd64,arm64 -no-global-types -output-stem sock_kprobe sockKprobe bpf/sock_kprobe.bpf.c -- -Ibpf/include -O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -mcpu=v3 -fdebug-prefix-map=$PWD=.
//go:generate go tool bpf2go -go-package observer -output-dir internal/observer -cc clang-14 -strip llvm-strip-14 -target bpfel -no-global-types nat bpf/nat.bpf.c -- -Ibpf/include -O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -mcpu=v3 -fdebug-prefix-map=$PWD=.
//go:generate go tool bpf2go -go-package observer -output-dir internal/observer -cc clang-14 -strip llvm-strip-14 -target bpfel -type nft_event -type nft_kind nft bpf/nft.bpf.c -- -Ibpf/include -O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -mcpu=v3 -fdebug-prefix-map=$PWD=.
//go:generate go tool bpf2go -go-package observer -output-dir internal/observer -cc clang-14 -strip llvm-strip-14 -target amd64,arm64 -no-global-types -output-stem nft_kprobe nftKprobe bpf/nft_kprobe.bpf.c -- -Ibpf/include -O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -mcpu=v3 -fdebug-prefix-map=$PWD=.
//go:generate go tool bpf2go -go-package observer -output-dir internal/observer -cc clang-14 -strip llvm-strip-14 -target bpfel -no-global-types conflict bpf/conflict.bpf.c -- -Ibpf/include -O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -mcpu=v3 -fdebug-prefix-map=$PWD=.
