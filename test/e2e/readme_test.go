// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// chapterOf returns the part of a document below a heading, "# " and the like included, up to the next one.
func chapterOf(t *testing.T, document, heading string) string {
	t.Helper()
	text, err := os.ReadFile("../../" + document)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut("\n"+string(text), "\n"+heading+"\n")
	if !ok {
		t.Fatalf("%s has no chapter %q", document, heading)
	}
	rest, _, _ = strings.Cut(rest, "\n##")
	return rest
}

// blocksOf returns the blocks of a chapter of a document.
func blocksOf(t *testing.T, document, heading string) (blocks [][]string) {
	t.Helper()
	rest := chapterOf(t, document, heading)
	for _, m := range regexp.MustCompile("(?ms)^```\n(.*?)^```").FindAllStringSubmatch(rest, -1) {
		blocks = append(blocks, strings.Split(strings.TrimSpace(m[1]), "\n"))
	}
	return blocks
}

// The lines for an agent in another network namespace, as they are printed there. The test has
// made the namespace.
func TestReadmeUnixLink(t *testing.T) {
	blocks := blocksOf(t, "docs/linux-vm.md", "## Two network namespaces")
	if len(blocks) != 1 || len(blocks[0]) != 3 {
		t.Fatalf("want a line for the namespace, one for the agent and one for the host: %q", blocks)
	}
	agent, ok := strings.CutPrefix(blocks[0][1], "sudo ip netns exec guest ")
	if !ok {
		t.Fatalf("the agent is not in the namespace: %q", blocks[0][1])
	}
	guest, host := newMachine(t), newMachine(t)
	host.shareRun(t, guest)
	guest.listen(t, "tcp4", "0.0.0.0:8001")
	guest.startCmd(t, "agent", guest.program(0, "sh", "-c", "exec "+strings.ReplaceAll(agent, "$(id -u)", strconv.Itoa(ordinary))))
	p := host.startCmd(t, "host", host.program(ordinary, "sh", "-c", "exec "+blocks[0][2]))
	host.active(t, ordinary, 8001, p)
}

// reader does what the README says, on a VM and on its host. What the lines install and
// start elsewhere are programs in PATH that note how they were called, and the test does
// their part: packages and units have tests of their own.
type reader struct {
	t           *testing.T
	guest, host *machine
	bin         string // these programs
	download    string // what the reader has of a release, two architectures
	peer        *process
}

// installers are these programs. virsh has the guest's token in a file beside it.
var installers = map[string]string{
	"apt": `case "$*" in
"install ./fairlead_0.1.0_amd64.deb") mkdir -p /etc/fairlead && cp -n "$REPO/deploy/packages/agent.yaml" /etc/fairlead/;;
"purge fairlead") rm -rf /etc/fairlead /var/lib/fairlead;;
*) exit 9;;
esac`,
	"dpkg":      `[ "$*" = --print-architecture ] && echo amd64`,
	"sudo":      `exec "$@"`,
	"systemctl": "",
	// These run a command as root of a guest; the line is read in that guest already.
	"podman": `[ "$1 $2 $3 $4" = "machine ssh --username root" ] && exec sh -ec "$5"`,
	// wsl's shell is outside of the namespaces of Rancher Desktop's init, in which are its
	// services and the agent's socket; wsl-exec enters these.
	"wsl": `[ "$1 $2 $3 $4 $5" = "-d rancher-desktop -u root --" ] && shift 5
[ "$1" != fairlead ] || exit 9
exec "$@"`,
	"wsl-exec":   `IN_INIT=1 exec "$@"`,
	"rc-service": `[ "$IN_INIT" = 1 ]`,
	"loginctl":   `[ "$*" = "enable-linger reader" ]`,
	"virsh": `case "$*" in
*"dumpxml --domain vm") echo "<domain><devices><vsock><cid auto='no' address='7'/></vsock></devices></domain>";;
*guest-file-open*) echo '{"return":1}';;
*guest-file-read*) echo "{\"return\":{\"count\":$(wc -c <"${0%/*}/token"),\"buf-b64\":\"$(base64 -w0 "${0%/*}/token")\"}}";;
*) echo '{"return":{}}';;
esac`,
}

func newReader(t *testing.T) *reader {
	t.Helper()
	r := &reader{t: t, guest: newMachine(t), host: newMachine(t), bin: t.TempDir(), download: t.TempDir()}
	for _, name := range []string{"fairlead_0.1.0_amd64.deb", "fairlead_0.1.0_arm64.deb"} {
		if err := os.WriteFile(filepath.Join(r.download, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(binary, filepath.Join(r.download, "fairlead")); err != nil {
		t.Fatal(err)
	}
	r.host.shareRun(t, r.guest)
	for name, script := range installers {
		script = fmt.Sprintf("#!/bin/sh -e\necho %s \"$@\" >>%s/log\n%s\n", name, r.bin, script)
		r.write(name, script, 0o755)
	}
	for _, m := range []*machine{r.guest, r.host} {
		if err := os.Symlink(filepath.Join(r.bin, "systemctl"), filepath.Join(m.dir, "systemctl")); err != nil {
			t.Fatal(err)
		}
	}
	r.write("log", "", 0o666)
	for _, dir := range []string{r.bin, r.download} {
		for ; len(dir) > len(os.TempDir()); dir = filepath.Dir(dir) {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	return r
}

// write makes a file beside the programs. The mode is exact.
func (r *reader) write(name, text string, mode os.FileMode) {
	r.t.Helper()
	path := filepath.Join(r.bin, name)
	if err := errors.Join(os.WriteFile(path, []byte(text), mode), os.Chmod(path, mode)); err != nil {
		r.t.Fatal(err)
	}
}

// enable runs what the unit of the package runs.
func (r *reader) enable() {
	r.t.Helper()
	r.guest.run(r.t, 0, "agent").Prints("ready")
	token, err := os.ReadFile(filepath.Join(r.guest.dir, "lib/fairlead/token"))
	if err != nil {
		r.t.Fatal(err)
	}
	r.write("token", string(token), 0o644)
}

// The reader may not use this machine's vsock: a unix socket with a token is in its place.
// VM, CID and the user's name are what every reader replaces.
func (r *reader) replaced(line string) string {
	token := filepath.Join(r.host.home, ".local/state/fairlead/token")
	return strings.NewReplacer(
		"|link: vsock|", `|link: unix:///run/fairlead/link.sock\nlinkToken: /var/lib/fairlead/token\nallowUIDs: 1000 #|`,
		"--connect vsock://CID:1023", "--connect unix:///run/fairlead/link.sock --link-token "+token,
		"--libvirt VM", "--libvirt vm", "$USER", "reader",
	).Replace(line)
}

// do runs a line in a shell of the VM's root, or of an ordinary user of the host. sudo
// changes the user.
func (r *reader) do(line string) string {
	r.t.Helper()
	m, uid := r.host, ordinary
	if !strings.HasPrefix(line, "fairlead ") && !strings.HasPrefix(line, "sudo ") {
		m, uid = r.guest, 0
	}
	if strings.HasPrefix(line, "sudo ") {
		uid = 0
	}
	return r.in(m, uid, line)
}

// in runs a line in a shell of a user of a machine, in the directory of the downloads.
func (r *reader) in(m *machine, uid int, line string) string {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), wait.Limit())
	defer cancel()
	c := m.program(uid, "sh", "-e", "-c", r.replaced(line))
	cmd := exec.CommandContext(ctx, c.Path, c.Args[1:]...)
	cmd.Dir = r.download
	repo, err := filepath.Abs("../..")
	if err != nil {
		r.t.Fatal(err)
	}
	cmd.Env = append(c.Env, "REPO="+repo)
	cmd.Env[0] = strings.Replace(cmd.Env[0], "PATH=", "PATH="+r.bin+":", 1)
	out, err := cmd.CombinedOutput()
	if err != nil {
		r.t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return string(out)
}

// unit runs what the user unit of `fairlead host install` runs.
func (r *reader) unit() {
	r.t.Helper()
	b, err := os.ReadFile(filepath.Join(r.host.home, ".config/systemd/user/fairlead-host.service"))
	if err != nil {
		r.t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^ExecStart=(.*)$`).FindSubmatch(b)
	if m == nil {
		r.t.Fatalf("no command in\n%s", b)
	}
	r.peer = r.host.startCmd(r.t, "host", r.host.program(ordinary, "sh", "-c", "exec "+string(m[1])))
}

// The lines of the README for a VM on Linux, from the installation, which may be pasted twice,
// to the removal, on the host as an ordinary user.
func TestReadmeLinuxVM(t *testing.T) {
	r := newReader(t)
	r.guest.listen(t, "tcp4", "0.0.0.0:8001")
	vm := blocksOf(t, "README.md", "### A Linux VM")
	if len(vm) != 3 {
		t.Fatalf("the README has %q", vm)
	}
	twice := slices.DeleteFunc(slices.Clone(vm[0]), func(line string) bool { return strings.HasPrefix(line, "systemctl") })
	for _, block := range [][]string{twice, vm[0], vm[1], vm[2]} {
		for _, line := range block {
			if strings.HasPrefix(line, "#") {
				continue
			}
			out := r.do(line)
			switch {
			case strings.HasPrefix(line, "systemctl enable --now fairlead-agent"):
				r.enable()
			case strings.HasPrefix(line, "fairlead host pair") && !strings.Contains(out, "--connect vsock://7:1023\n"):
				t.Errorf("pair does not tell the endpoint: %s", out)
			case strings.HasPrefix(line, "fairlead host install"):
				r.unit()
				r.host.active(t, ordinary, 8001, r.peer)
			case strings.HasPrefix(line, "fairlead ls") && !strings.Contains(out, "127.0.0.1:8001"):
				t.Errorf("%s: %s", line, out)
			}
		}
	}
	for _, path := range []string{"home/.config/systemd/user/fairlead-host.service", "home/.config/systemd/user/default.target.wants"} {
		if _, err := os.Lstat(filepath.Join(r.host.dir, path)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	log, err := os.ReadFile(filepath.Join(r.bin, "log"))
	for _, want := range []string{"systemctl --user enable fairlead-host.service", "systemctl --user disable --now fairlead-host.service", "loginctl enable-linger", "apt purge"} {
		if err != nil || !strings.Contains(string(log), want) {
			t.Errorf("no %q in %s, %v", want, log, err)
		}
	}
}

// installed is a guest in which the reader installs an archive: it has a /usr/local/bin of its
// own, and what the init starts is in there.
func (r *reader) installed(init string) {
	r.t.Helper()
	for _, dir := range []string{"bin", "etc/systemd/system", init} {
		if err := os.MkdirAll(filepath.Join(r.guest.dir, dir), 0o755); err != nil {
			r.t.Fatal(err)
		}
	}
	r.guest.listen(r.t, "tcp4", "0.0.0.0:8001")
}

// started runs what the unit of `fairlead agent install` runs, and waits until it is ready.
func (r *reader) started() {
	r.t.Helper()
	b, err := os.ReadFile(filepath.Join(r.guest.dir, "etc/systemd/system/fairlead-agent.service"))
	if err != nil {
		r.t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^ExecStart=("/usr/local/bin/fairlead" "agent".*)$`).FindSubmatch(b)
	if m == nil {
		r.t.Fatalf("no command in\n%s", b)
	}
	r.guest.startCmd(r.t, "agent", r.guest.program(0, "sh", "-c", "exec "+string(m[1]))).Prints("ready")
}

// The lines for guests in which an archive is installed: WSL, a Podman machine.
func TestReadmeAgentInstall(t *testing.T) {
	for _, tt := range []struct{ document, heading, remove string }{
		{"README.md", "### WSL", "fairlead agent uninstall"},
		{"docs/podman.md", "# Podman machine", "podman machine ssh --username root 'fairlead agent uninstall'"},
	} {
		t.Run(tt.document, func(t *testing.T) {
			r := newReader(t)
			r.installed("run/systemd/system")
			blocks := blocksOf(t, tt.document, tt.heading)
			if len(blocks) == 0 || len(blocks[0]) != 3 || !strings.Contains(chapterOf(t, tt.document, tt.heading), "`"+tt.remove+"`") {
				t.Fatalf("%s has %q", tt.document, blocks)
			}
			for _, line := range blocks[0] {
				out := r.in(r.guest, 0, line)
				switch {
				case strings.Contains(line, "fairlead agent install"):
					r.started()
				case strings.Contains(line, "fairlead ls") && !strings.Contains(out, "8001/tcp"):
					t.Errorf("%s: %s", line, out)
				}
			}
			r.in(r.guest, 0, blocks[0][0]) // the next version, while this one runs
			r.in(r.guest, 0, tt.remove)
			if left, err := os.ReadDir(filepath.Join(r.guest.dir, "etc/systemd/system")); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
			log, err := os.ReadFile(filepath.Join(r.bin, "log"))
			for _, want := range []string{"systemctl enable fairlead-agent", "systemctl disable --now fairlead-agent"} {
				if err != nil || !strings.Contains(string(log), want) {
					t.Errorf("no %q in %s, %v", want, log, err)
				}
			}
		})
	}
}

// The lines that swap Rancher Desktop's agent and bring it back.
func TestReadmeRancherDesktop(t *testing.T) {
	r := newReader(t)
	r.installed("run/openrc")
	agent := filepath.Join(r.guest.dir, "bin/rancher-desktop-guestagent")
	if err := errors.Join(
		os.WriteFile(agent, []byte("Rancher Desktop's"), 0o755),
		os.Symlink(filepath.Join(r.bin, "wsl-exec"), filepath.Join(r.guest.dir, "bin/wsl-exec")),
	); err != nil {
		t.Fatal(err)
	}
	const document, heading = "docs/rancher-desktop.md", "## Swap it"
	blocks := blocksOf(t, document, heading)
	if len(blocks) != 1 || len(blocks[0]) != 5 {
		t.Fatalf("%s has %q", document, blocks)
	}
	for _, line := range blocks[0] {
		out := r.in(r.guest, 0, line)
		switch {
		case strings.Contains(line, "rc-service rancher-desktop-guestagent restart"):
			cmd := r.guest.program(0, "/usr/local/bin/rancher-desktop-guestagent", "-docker", "-debug")
			r.guest.startCmd(t, "agent", cmd).Prints("virtual network", "ready")
		case strings.Contains(line, "fairlead ls") && !strings.Contains(out, "8001/tcp"):
			t.Errorf("%s: %s", line, out)
		}
	}
	for _, line := range blocks[0][:3] { // the next version, while this one runs
		r.in(r.guest, 0, line)
	}
	back := regexp.MustCompile("`(wsl .* mv .*)`").FindStringSubmatch(chapterOf(t, document, heading))
	if back == nil {
		t.Fatalf("%s does not say how to remove it", document)
	}
	r.in(r.guest, 0, back[1])
	if b, err := os.ReadFile(agent); err != nil || string(b) != "Rancher Desktop's" {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}
