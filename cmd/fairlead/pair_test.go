// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/setup/pair"
)

// fakeProgram puts a program into PATH, alone, that runs a script.
func fakeProgram(t *testing.T, name, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
}

// Pairing stores the token where `fairlead host` looks for it, and prints the command
// that connects.
func TestPairPrintsTheNextCommand(t *testing.T) {
	const token = "0123456789abcdef0123456789abcdef"
	for _, c := range []struct{ args, program, script, file, next string }{
		{
			"--libvirt vm --guest dev", "virsh", `case "$*" in
*dumpxml*) echo "<domain><devices><vsock><cid auto='no' address='7'/></vsock></devices></domain>";;
*open*) echo '{"return":1}';;
*read*) echo '{"return":{"count":32,"buf-b64":"MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="}}';;
*) echo '{"return":{}}';;
esac`, "dev.token", "Next: fairlead host install -- --connect dev=vsock://7:1023\n",
		},
	} {
		file := filepath.Join(t.TempDir(), c.file)
		fakeProgram(t, c.program, c.script)
		out, stderr, code := execute(t, append([]string{"host", "pair", "--link-token", file}, strings.Fields(c.args)...)...)
		next := strings.Replace(c.next, "\n", " --link-token "+file+"\n", 1)
		if code != exitOK || !strings.HasPrefix(out, "Token stored in "+file+".\n") || !strings.Contains(out, next) || !strings.Contains(out, "name each other guest by its --connect as well") {
			t.Errorf("%s: exit %d, %q, %q; want %q", c.args, code, out, stderr, next)
		}
		if b, err := os.ReadFile(file); err != nil || string(b) != token+"\n" {
			t.Errorf("%s: %q, %v", c.args, b, err)
		}
	}
}

// Where the channel does not tell the endpoint, the next step is one that works there.
func TestNextStepOfEachChannel(t *testing.T) {
	const home = "/home/me/Application Support/fairlead"
	t.Setenv("HOME", "/home/me/x y")
	t.Setenv("LIMA_HOME", "")
	for _, c := range []struct {
		flags pairFlags
		goos  string
		want  []string // lines
	}{
		{pairFlags{ssh: "me@vm", guest: "lab"}, "linux", []string{
			"Next, for a VM of this machine that has vsock (QEMU: guest-cid=CID): fairlead host install -- --connect lab=vsock://CID:1023",
			`Next: ssh -N -o ControlPath=none -o ExitOnForwardFailure=yes -o StreamLocalBindUnlink=yes -L "` + home + `/lab.sock:/run/fairlead/link.sock" me@vm`,
			`Then: fairlead host install -- --connect "lab=unix://` + home + `/lab.sock"`,
		}},
		{pairFlags{ssh: "root@vm", file: "/t/x"}, "linux", []string{
			"Next, for a VM of this machine that has vsock (QEMU: guest-cid=CID): fairlead host install -- --connect vsock://CID:1023 --link-token /t/x",
			`Then: fairlead host install -- --connect "unix://` + home + `/vm.sock"`,
		}},
		{pairFlags{ssh: "root@vm"}, "darwin", []string{`Next: ssh -N -o ControlPath=none -o ExitOnForwardFailure=yes -o StreamLocalBindUnlink=yes -L "` + home + `/vm.sock:/run/fairlead/link.sock" root@vm`}},
		{pairFlags{ssh: "root@web1", guest: "web1"}, "linux", []string{"A guest that dials out needs none of this: the host that listens for it reads the token when it dials again."}},
		{pairFlags{ssh: "root@vm"}, "windows", []string{"Next: fairlead host install -- --connect hvsock://ID:1023"}},
		{pairFlags{lima: "dev"}, "darwin", []string{
			`Next: ssh -N -o ControlPath=none -o ExitOnForwardFailure=yes -o StreamLocalBindUnlink=yes -L "` + home + `/dev.sock:/run/fairlead/link.sock" -F "/home/me/x y/.lima/dev/ssh.config" lima-dev`,
			`Then: fairlead host install -- --connect "unix://` + home + `/dev.sock"`,
		}},
		{pairFlags{lima: "dev"}, "windows", []string{"Next: fairlead host install -- --connect hvsock://wsl:1023"}},
		{pairFlags{podman: "m"}, "linux", []string{"Next: podman machine ssh --username root m 'fairlead agent install -- --sink gvproxy'"}},
		{pairFlags{podman: "m", guest: "p"}, "windows", []string{"Next: fairlead host install -- --connect p=hvsock://wsl:1023"}},
		{pairFlags{from: "-"}, "linux", []string{"Next: fairlead host install -- --connect vsock://CID:1023"}},
		{pairFlags{from: "-"}, "windows", []string{"Next: fairlead host install -- --connect hvsock://wsl:1023"}},
		{pairFlags{}, "windows", []string{"Next: fairlead host install -- --connect hvsock://wsl:1023"}},
	} {
		next := c.flags.next(c.goos, config.DefaultHost(), home+"/token")
		for _, want := range c.want {
			if !slices.Contains(strings.Split(next, "\n"), want) {
				t.Errorf("%s, %+v: no line\n%s\nin\n%s", c.goos, c.flags, want, next)
			}
		}
	}
}

// --connect takes the place of the guests that host.yaml lists, so it is not advised there.
func TestNextStepBesideListedGuests(t *testing.T) {
	home := homeOfUser(t)
	dir := filepath.Join(home, "config", "fairlead")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "host.yaml"), []byte("connect: [dev=vsock://3:1023, vsock://9:1023]\n"), 0o644)); err != nil { //nolint:gosec // another user reads it
		t.Fatal(err)
	}
	asUser(t, func() {
		var none pairFlags
		host, err := none.host()
		if err != nil {
			t.Error(err)
			return
		}
		for _, c := range []struct{ guest, endpoint, want string }{
			{"dev", "vsock://3:1023", "fairlead host install"},
			{"", "vsock://9:1023", "fairlead host install"},
			{"build", "vsock://4:1023", `have "build=vsock://4:1023" under connect in ` + dir + "/host.yaml, then run: fairlead host install"},
			{"", "vsock://CID:1023", `have "vsock://CID:1023" under connect in ` + dir + "/host.yaml, then run: fairlead host install"},
		} {
			f := pairFlags{guest: c.guest}
			if got := f.install(host, c.endpoint); got != c.want {
				t.Errorf("%+v: %s", c, got)
			}
		}
	})
}

// ssh's configuration of an instance is where Lima or Colima made it.
func TestConfigurationOfLimaForSSH(t *testing.T) {
	home, lima, xdg := t.TempDir(), t.TempDir(), t.TempDir()
	for _, dir := range []string{home + "/.lima/dev", home + "/.colima/_lima/colima", xdg + "/colima/_lima/colima-x", lima + "/dev", lima + "/colima"} {
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(dir+"/ssh.config", nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ lima, colima, instance, want string }{
		{"", "", "dev", home + "/.lima/dev/ssh.config"},
		{"", "", "colima", home + "/.colima/_lima/colima/ssh.config"},
		{"", "", "colima-x", xdg + "/colima/_lima/colima-x/ssh.config"},
		{"", "", "new", home + "/.lima/new/ssh.config"},
		{lima, "", "dev", lima + "/dev/ssh.config"},
		{lima, "", "new", lima + "/new/ssh.config"},
		{"", home + "/.colima", "colima", home + "/.colima/_lima/colima/ssh.config"},
	} {
		t.Setenv("HOME", home)
		t.Setenv("LIMA_HOME", c.lima)
		t.Setenv("COLIMA_HOME", c.colima)
		t.Setenv("XDG_CONFIG_HOME", xdg)
		if got := limaConfig(c.instance); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// A guest without a known endpoint can be paired all the same.
func TestPairOverSSH(t *testing.T) {
	const token = "0123456789abcdef0123456789abcdef"
	file := filepath.Join(t.TempDir(), "lab.token")
	fakeProgram(t, "ssh", "echo "+token)
	out, stderr, code := execute(t, "host", "pair", "--ssh", "root@vm", "--guest", "lab", "--link-token", file)
	if b, err := os.ReadFile(file); err != nil || string(b) != token+"\n" || code != exitOK || !strings.Contains(out, "lab.sock:/run/fairlead/link.sock\" root@vm\n") {
		t.Errorf("%q, %v; exit %d, %q, %q", b, err, code, out, stderr)
	}
}

// An agent with its default link has no token, and ssh forwards its socket without one.
func TestPairOverSSHWithoutAToken(t *testing.T) {
	homeOfUser(t)
	fakeProgram(t, "ssh", "echo cat: no such file >&2; exit 1")
	asUser(t, func() {
		if _, stderr, code := execute(t, "host", "pair", "--ssh", "root@vm"); code == exitOK || !strings.Contains(stderr, "docs/linux-vm.md#ssh") {
			t.Errorf("exit %d, %q", code, stderr)
		}
		if _, stderr, code := execute(t, "host", "pair", "--ssh", "root@vm", "--guest-file", "/x"); code == exitOK || strings.Contains(stderr, "docs/linux-vm.md#ssh") {
			t.Errorf("asked for: exit %d, %q", code, stderr)
		}
	})
	text, err := os.ReadFile("../../docs/linux-vm.md")
	if err != nil || !strings.Contains(string(text), "\n## ssh\n") {
		t.Errorf("the chapter that is named: %v", err)
	}
}

// With linkToken in host.yaml the host wants a token on unix links, too.
func TestNextStepWithATokenForAllLinks(t *testing.T) {
	host := config.DefaultHost()
	f := pairFlags{lima: "dev", guestFile: "/var/lib/fairlead/token"}
	if next := f.next("darwin", host, "/x/token"); !strings.Contains(next, "needs no token") {
		t.Error(next)
	}
	host.TokenGiven = true
	if next := f.next("darwin", host, "/x/token"); strings.Contains(next, "needs no token") || !strings.Contains(next, "start the agent with --link-token /var/lib/fairlead/token.") {
		t.Error(next)
	}
}

// A link that has no token needs none: where ssh forwards the agent's socket, and for a
// Podman machine outside WSL, nothing is fetched, and the next step is printed.
func TestPairFetchesNoTokenThatIsNotUsed(t *testing.T) {
	home := homeOfUser(t)
	fakeProgram(t, "limactl", "exit 9")
	asUser(t, func() {
		for args, want := range map[string]string{
			"--lima dev":            "Then: fairlead host install -- --connect unix://",
			"--lima dev --guest me": "me=unix://",
			"--podman m":            "Next: podman machine ssh --username root m ",
		} {
			dir := filepath.Join(home, "state", "fairlead")
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
			out, stderr, code := execute(t, append([]string{"host", "pair"}, strings.Fields(args)...)...)
			if code != exitOK || !strings.Contains(out, want) || strings.Contains(out, "stored") {
				t.Errorf("%s: exit %d, %q, %q; want %q", args, code, out, stderr, want)
			}
			// ssh makes a socket in it, and no directory.
			fi, err := os.Stat(dir)
			if forwards := strings.Contains(out, dir+"/"); forwards != (err == nil) || forwards && fi.Mode().Perm() != 0o700 {
				t.Errorf("%s: the directory of the socket: %v, %v", args, fi, err)
			}
		}
	})
	for _, c := range []struct {
		flags pairFlags
		goos  string
		want  bool
	}{
		{pairFlags{lima: "dev"}, "darwin", true},
		{pairFlags{lima: "dev"}, "windows", false},
		{pairFlags{podman: "m"}, "darwin", true},
		{pairFlags{podman: "m"}, "windows", false},
		{pairFlags{ssh: "me@vm"}, "darwin", true},
		{pairFlags{ssh: "me@vm"}, "linux", false},                   // it may have vsock
		{pairFlags{ssh: "me@web1", guest: "web1"}, "darwin", false}, // it may dial out
		{pairFlags{ssh: "me@vm", libvirt: pair.Libvirt{Domain: "vm"}}, "darwin", false},
		{pairFlags{from: "-"}, "darwin", false},
		{pairFlags{}, "windows", false},
	} {
		if got := c.flags.needless(c.goos); got != c.want {
			t.Errorf("%s, %+v: %v", c.goos, c.flags, got)
		}
	}
}

// Who asks for a token gets it, also where the link needs none; a name that a shell would
// take for something else is in no command.
func TestPairFetchesWhatIsAskedFor(t *testing.T) {
	const token = "0123456789abcdef0123456789abcdef"
	file := filepath.Join(t.TempDir(), "lab.token")
	fakeProgram(t, "limactl", "echo "+token)
	out, stderr, code := execute(t, "host", "pair", "--lima", "dev", "--link-token", file)
	if b, err := os.ReadFile(file); err != nil || string(b) != token+"\n" || code != exitOK {
		t.Errorf("%q, %v; exit %d, %q, %q", b, err, code, out, stderr)
	}
	for _, flag := range []string{"--lima", "--podman"} {
		if out, stderr, code := execute(t, "host", "pair", flag, "a;b"); code == exitOK || out != "" || !strings.Contains(stderr, "want a name") {
			t.Errorf("%s: exit %d, %q, %q", flag, code, out, stderr)
		}
	}
}

func TestPairWantsOneChannel(t *testing.T) {
	for args, want := range map[string]string{
		"":                        "--libvirt, --lima, --podman, --ssh, or --from",
		"--lima a --podman b":     "--lima and --podman",
		"--libvirt a --lima b":    "--libvirt and --lima",
		"--from - --guest a/b":    "--guest",
		"--ssh a --from b --lima": "--lima",
	} {
		if _, stderr, code := execute(t, append([]string{"host", "pair"}, strings.Fields(args)...)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%q: exit %d, %q, want %q", args, code, stderr, want)
		}
	}
}
