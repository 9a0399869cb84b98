// SPDX-License-Identifier: Apache-2.0

//go:build linux && vm

// Package selftest checks, from inside, that the machines of test/vm are what
// other tests rely on.
package selftest

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// TestKernel proves that the kernel that runs is the one that was asked for.
func TestKernel(t *testing.T) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	release := unix.ByteSliceToString(u.Release[:])
	if want := os.Getenv("FAIRLEAD_KERNEL"); want == "" || release != want {
		t.Errorf("release is %q, want %q", release, want)
	}
}

// moduleTypes reports whether nf_tables has types of its own: if it is a module, since Linux 5.11.
func moduleTypes(t *testing.T) bool {
	t.Helper()
	var major, minor int
	if _, err := fmt.Sscanf(os.Getenv("FAIRLEAD_KERNEL"), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	_, err := os.Stat("/sys/module/nf_tables/initstate")
	return err == nil && (major > 5 || major == 5 && minor >= 11)
}

func TestFiles(t *testing.T) {
	files := []string{
		"/sys/kernel/btf/vmlinux", "/sys/kernel/tracing/kprobe_events",
		"/sys/kernel/debug/tracing", "/sys/fs/cgroup/cgroup.procs", "/dev/vsock", "/dev/kmsg",
	}
	if moduleTypes(t) {
		files = append(files, "/sys/kernel/btf/nf_tables")
	}
	for _, file := range files {
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
	}
	for path, magic := range map[string]int64{
		"/sys/fs/bpf": unix.BPF_FS_MAGIC, "/sys/fs/cgroup": unix.CGROUP2_SUPER_MAGIC, "/tmp": unix.TMPFS_MAGIC,
		"/sys/kernel/tracing": unix.TRACEFS_MAGIC, "/sys/kernel/debug": unix.DEBUGFS_MAGIC,
	} {
		var s unix.Statfs_t
		if err := unix.Statfs(path, &s); err != nil || s.Type != magic {
			t.Errorf("file system at %s: type %#x, error %v; want %#x", path, s.Type, err, magic)
		}
	}
}

// TestModules proves that each module that tests may ask for loads.
func TestModules(t *testing.T) {
	for _, m := range strings.Fields(`nft_compat nft_chain_nat nft_nat nft_redir nft_masq nft_fib_inet nft_fib_ipv4 nft_fib_ipv6 nft_numgen
		iptable_nat ip6table_nat xt_nat xt_tcpudp xt_addrtype xt_comment xt_multiport xt_conntrack xt_mark
		xt_MASQUERADE xt_REDIRECT xt_statistic bridge br_netfilter veth dummy tun overlay tcp_diag udp_diag
		vsock_loopback`) {
		run(t, "modprobe", m)
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Error(err)
	}
}

// TestNAT proves that each way to write a rule works, in a namespace of its own,
// with modules that the kernel asks for itself.
func TestNAT(t *testing.T) {
	const ns = "fl-selftest"
	run(t, "ip", "netns", "add", ns)
	defer run(t, "ip", "netns", "del", ns)
	in := func(args ...string) string {
		return run(t, "ip", append([]string{"netns", "exec", ns}, args...)...)
	}
	for _, iptables := range []string{"iptables-legacy", "iptables-nft", "ip6tables-legacy", "ip6tables-nft"} {
		in(iptables, "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "--dport", "81", "-m", "addrtype", "--dst-type", "LOCAL",
			"-m", "comment", "--comment", "x", "-j", "REDIRECT", "--to-ports", "8081")
		if out := in(iptables+"-save", "-t", "nat"); !strings.Contains(out, "--to-ports 8081") {
			t.Errorf("%s-save: no rule in %q", iptables, out)
		}
	}
	for _, family := range []string{"ip", "ip6"} {
		in("nft", "table "+family+` own { chain pre { type nat hook prerouting priority -100;
			fib daddr type local tcp dport 83 counter redirect to :8083; }; }`)
	}
	in("nft", `table inet own {
		map ports { type inet_proto . inet_service : ipv4_addr . inet_service; elements = { tcp . 82 : 192.0.2.1 . 8082 }; }
		chain pre { type nat hook prerouting priority -100; fib daddr type local dnat ip to meta l4proto . th dport map @ports; }
		chain post { type nat hook postrouting priority 100; masquerade; }
	}`)
	if out := in("nft", "list", "ruleset"); !strings.Contains(out, "192.0.2.1") {
		t.Errorf("nft list ruleset: no element in %q", out)
	}
}

func TestVethAndSS(t *testing.T) {
	run(t, "ip", "link", "add", "fl-self0", "type", "veth", "peer", "name", "fl-self1")
	defer run(t, "ip", "link", "del", "fl-self0")
	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if out := run(t, "ss", "-Htln"); !strings.Contains(out, netip.MustParseAddrPort(l.Addr().String()).String()) {
		t.Errorf("ss does not list %s: %q", l.Addr(), out)
	}
}

// TestVsockLoopback proves that a socket of one address family that most test
// machines lack works here: both ends are this machine, CID 1.
func TestVsockLoopback(t *testing.T) {
	const port = 1000
	l, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(l)
	if err := errors.Join(unix.Bind(l, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port}), unix.Listen(l, 1)); err != nil {
		t.Fatal(err)
	}
	c, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(c)
	if err := unix.Connect(c, &unix.SockaddrVM{CID: unix.VMADDR_CID_LOCAL, Port: port}); err != nil {
		t.Fatal(err)
	}
	s, from, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	server := os.NewFile(uintptr(s), "vsock")
	defer server.Close()
	if vm, ok := from.(*unix.SockaddrVM); !ok || vm.CID != unix.VMADDR_CID_LOCAL {
		t.Errorf("peer is %+v, want CID %d", from, unix.VMADDR_CID_LOCAL)
	}
	if _, err := unix.Write(c, []byte("ahoy")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Shutdown(c, unix.SHUT_WR); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(server); err != nil || string(got) != "ahoy" {
		t.Errorf("server read %q, error %v", got, err)
	}
}

func TestTestdata(t *testing.T) {
	if got, err := os.ReadFile("testdata/here"); err != nil || string(got) != "here\n" {
		t.Errorf("read %q, error %v", got, err)
	}
}
