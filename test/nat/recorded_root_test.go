// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package nat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// recordedCases are rulesets of the corpus that have all that tools and people write.
var recordedCases = []string{"docker-legacy", "docker-nft", "docker-nftables", "hand-iptables", "hand-legacy", "hand-nft", "kube-nftables", "portmap-nftables"}

// perKind bounds how many messages of a kind are kept of each ruleset.
const perKind = 3

// What this kernel sends for the corpus is understood. With -update it becomes seeds of
// the fuzz targets.
func TestRecordedMessages(t *testing.T) {
	for _, c := range corpusCases(t) {
		if !slices.Contains(recordedCases, c.Name) {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			w := newWorld(t)
			w.load(c)
			space, err := netns.Open(w.path())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = space.Close() }()
			messages, blobs := 0, 0
			err = space.Do(func() (err error) {
				if messages, err = recordMessages(t, c.Name); err != nil {
					return err
				}
				blobs, err = recordLegacy(t, c.Name)
				return err
			})
			if err != nil || messages+blobs == 0 {
				t.Errorf("%d messages, %d legacy tables: %v", messages, blobs, err)
			}
		})
	}
}

// recordMessages reads all objects of nftables in this namespace.
func recordMessages(t *testing.T, name string) (n int, err error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	kept := map[uint8]int{}
	dump := func(typ, family uint8, attrs []byte) (all []*ruleset.Message, err error) {
		answers, err := conn.Execute(netlink.Message{
			Header: netlink.Header{Type: netlink.HeaderType(ruleset.Subsystem<<8 | uint16(typ)), Flags: netlink.Request | netlink.Dump},
			Data:   append([]byte{family, 0, 0, 0}, attrs...),
		})
		for _, a := range answers {
			m, err := ruleset.ParseMessage(uint8(a.Header.Type), uint16(a.Header.Flags), a.Data)
			if err != nil {
				return nil, fmt.Errorf("% x: %w", a.Data, err)
			}
			all = append(all, m)
			if kept[uint8(a.Header.Type)]++; kept[uint8(a.Header.Type)] > perKind {
				continue
			}
			file := fmt.Sprintf("%s-%d-%d", name, uint8(a.Header.Type), kept[uint8(a.Header.Type)])
			keepSeed(t, "compile", "FuzzMessage", file, fmt.Sprintf("byte(%q)", uint8(a.Header.Type)), fmt.Sprintf("uint16(%d)", uint16(a.Header.Flags)), bytesSeed(a.Data))
			if typ == ruleset.MsgGetRule {
				keepSeed(t, "compile", "FuzzRule", file, bytesSeed(m.Raw))
			}
		}
		return all, err
	}
	for _, typ := range []uint8{ruleset.MsgGetTable, ruleset.MsgGetChain, ruleset.MsgGetRule, ruleset.MsgGetSet} {
		all, err := dump(typ, unix.AF_UNSPEC, nil)
		if err != nil {
			return n, err
		}
		n += len(all)
		if typ != ruleset.MsgGetSet {
			continue
		}
		for _, m := range all {
			attrs := ruleset.AppendAttr(ruleset.AppendAttr(nil, 1, append([]byte(m.Table.Name), 0)), 2, append([]byte(m.Set.Name), 0))
			elements, err := dump(ruleset.MsgGetElem, m.Table.Family, attrs)
			if err != nil {
				return n, err
			}
			n += len(elements)
		}
	}
	return n, nil
}

// recordLegacy reads the nat tables of iptables-legacy in this namespace.
func recordLegacy(t *testing.T, name string) (n int, err error) {
	for _, v6 := range []bool{false, true} {
		info, blob, err := legacyTable(v6)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOPROTOOPT) || errors.Is(err, unix.EPROTONOSUPPORT) {
			continue // nobody has made it
		}
		if err != nil {
			return n, err
		}
		parsed, err := ruleset.ParseLegacyInfo(info)
		if err != nil {
			return n, err
		}
		if _, err := ruleset.ParseLegacy(v6, parsed, blob); err != nil {
			return n, err
		}
		n++
		file := fmt.Sprintf("%s-%t", name, v6)
		keepSeed(t, "ruleset", "FuzzLegacyInfo", file, bytesSeed(info))
		keepSeed(t, "compile", "FuzzLegacyTable", file, fmt.Sprintf("bool(%t)", v6), bytesSeed(info), bytesSeed(blob))
	}
	return n, nil
}

// legacyTable returns struct ipt_getinfo and the entries of the nat table.
func legacyTable(v6 bool) (info, blob []byte, err error) {
	domain, level := unix.AF_INET, unix.IPPROTO_IP
	if v6 {
		domain, level = unix.AF_INET6, unix.IPPROTO_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	get := func(opt uintptr, b []byte) error {
		n := uint32(len(b))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), opt,
			uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0)
		if errno != 0 {
			return errno
		}
		return nil
	}
	info = make([]byte, 84)
	copy(info, "nat")
	if err := get(64, info); err != nil { // IPT_SO_GET_INFO
		return nil, nil, err
	}
	size := binary.NativeEndian.Uint32(info[80:])
	blob = make([]byte, 40+int(size)) // struct ipt_get_entries
	copy(blob, "nat")
	binary.NativeEndian.PutUint32(blob[32:], size)
	if err := get(65, blob); err != nil { // IPT_SO_GET_ENTRIES
		return nil, nil, err
	}
	return info, blob[40:], nil
}

func bytesSeed(b []byte) string { return fmt.Sprintf("[]byte(%q)", b) }

// keepSeed writes a seed of a fuzz target with -update.
func keepSeed(t *testing.T, pkg, target, name string, values ...string) {
	t.Helper()
	if !*update {
		return
	}
	dir := filepath.Join("../../internal/guest/source/nat", pkg, "testdata/fuzz", target)
	text := "go test fuzz v1\n"
	for _, v := range values {
		text += v + "\n"
	}
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
}
