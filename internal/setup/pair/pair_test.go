// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	secret    = "0123456789abcdef0123456789abcdef"
	tokenFile = "/var/lib/fairlead/token"
)

// answer is what a fake program prints, and how it ends.
type answer struct {
	out, err string
	code     int
}

// fake puts a program into PATH, alone, that gives recorded answers in turn. It returns
// its path, and what returns the arguments that it got, one line for each start.
func fake(t *testing.T, name string, answers ...answer) (path string, asked func() []string) {
	t.Helper()
	dir := t.TempDir()
	path = filepath.Join(dir, name)
	files := map[string]string{"": `#!/bin/sh
printf '<%s>' "$@" >>"$0.asked"
echo >>"$0.asked"
n=0
while read -r _; do n=$((n + 1)); done <"$0.asked"
/bin/cat "$0.out$n"
/bin/cat "$0.err$n" >&2
read -r code <"$0.code$n"
exit "$code"
`}
	for i, a := range answers {
		files[fmt.Sprint(".out", i+1)], files[fmt.Sprint(".err", i+1)] = a.out, a.err
		files[fmt.Sprint(".code", i+1)] = fmt.Sprintln(a.code)
	}
	for suffix, text := range files {
		if err := os.WriteFile(path+suffix, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	return path, func() []string {
		b, err := os.ReadFile(path + ".asked")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		return strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
	}
}

// fetched is the token that Fetch stored, empty if none.
func fetched(t *testing.T, c Channel) (string, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "state", "token")
	err := Fetch(t.Context(), c, tokenFile, file)
	b, rerr := os.ReadFile(file)
	if (rerr == nil) != (err == nil) {
		t.Errorf("a file is there: %v, error: %v", rerr == nil, err)
	}
	if err != nil && strings.Contains(err.Error(), secret) {
		t.Errorf("the error has the token: %v", err)
	}
	return string(b), err
}

// agentAnswers are the three of the guest agent for a file.
func agentAnswers(read string) []answer {
	return []answer{{out: `{"return":1000}` + "\n"}, {out: read + "\n\n"}, {out: `{"return":{}}` + "\n"}}
}

const agentRead = `{"return":{"count":33,"buf-b64":"MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWYK","eof":true}}`

func TestEachChannel(t *testing.T) {
	for _, c := range []struct {
		name, program string
		channel       Channel
		answers       []answer
		asked         []string
	}{
		{
			"Lima", "limactl", Lima{"dev"}, []answer{{out: secret + "\n"}},
			[]string{"<shell><--workdir></><dev><sudo><-n><cat><" + tokenFile + ">"},
		},
		{
			"Podman", "podman", Podman{"podman-machine-default"}, []answer{{out: secret + "\r\n"}},
			[]string{"<machine><ssh><--username><root><podman-machine-default><cat><" + tokenFile + ">"},
		},
		{
			"ssh", "ssh", SSH{"me@192.0.2.7"}, []answer{{out: secret, err: "Warning: Permanently added '192.0.2.7'\n"}},
			[]string{"<-T><--><me@192.0.2.7><sudo><-n><cat><" + tokenFile + ">"},
		},
		{"ssh as root", "ssh", SSH{"root@vm"}, []answer{{out: secret}}, []string{"<-T><--><root@vm><cat><" + tokenFile + ">"}},
		{
			"libvirt", "virsh", Libvirt{Domain: "dev", URI: "qemu:///system"}, agentAnswers(agentRead),
			[]string{
				`<--connect=qemu:///system><--quiet><qemu-agent-command><--domain><dev><--timeout><30><{"arguments":{"mode":"r","path":"` + tokenFile + `"},"execute":"guest-file-open"}>`,
				`<--connect=qemu:///system><--quiet><qemu-agent-command><--domain><dev><--timeout><30><{"arguments":{"count":4097,"handle":1000},"execute":"guest-file-read"}>`,
				`<--connect=qemu:///system><--quiet><qemu-agent-command><--domain><dev><--timeout><30><{"arguments":{"handle":1000},"execute":"guest-file-close"}>`,
			},
		},
	} {
		_, asked := fake(t, c.program, c.answers...)
		got, err := fetched(t, c.channel)
		if err != nil || got != secret+"\n" || !slices.Equal(asked(), c.asked) {
			t.Errorf("%s: %q, %v\nasked %q, want\n%q", c.name, got, err, asked(), c.asked)
		}
	}
}

// An error names the command, how it ended, and what to do, and stores nothing.
func TestFailures(t *testing.T) {
	for _, c := range []struct {
		name, program string
		channel       Channel
		answers       []answer
		want          []string
	}{
		{
			"no instance", "limactl", Lima{"dev"}, []answer{{err: `time="2026-11-21T12:00:00Z" level=fatal msg="instance \"dev\" does not exist"` + "\n", code: 1}},
			[]string{"/limactl shell --workdir / dev sudo -n cat " + tokenFile + ": exit status 1", "does not exist", "`limactl list`"},
		},
		{
			"no file", "podman", Podman{"m"}, []answer{{err: "cat: " + tokenFile + ": No such file or directory\n", code: 1}},
			[]string{"/podman machine ssh", "exit status 1", "No such file", "start the agent there once"},
		},
		{
			"no sudo", "ssh", SSH{"me@vm"}, []answer{{err: "sudo: a password is required\n", code: 1}},
			[]string{"a password is required", "take root@"},
		},
		{"no connection", "ssh", SSH{"root@vm"}, []answer{{err: strings.Repeat("x", 4000), code: 255}}, []string{"exit status 255"}},
		{"a text at each login", "ssh", SSH{"root@vm"}, []answer{{out: "Welcome!\n" + secret}}, []string{"at each login"}},
		{"a long text", "ssh", SSH{"root@vm"}, []answer{{out: strings.Repeat("x", 5000)}}, []string{"more than 4096 bytes"}},
		{"a longer text", "ssh", SSH{"root@vm"}, []answer{{out: strings.Repeat("x", maxOutput+2)}}, []string{"more than 1048576 bytes"}},
		{"an empty file", "ssh", SSH{"root@vm"}, []answer{{}}, []string{"is empty"}},
		{"a short text", "ssh", SSH{"root@vm"}, []answer{{out: "hunter2"}}, []string{"at least 32"}},
		{
			"no guest agent", "virsh", Libvirt{Domain: "dev"}, []answer{{err: "error: Guest agent is not responding: QEMU guest agent is not connected\n", code: 1}},
			[]string{"/virsh --quiet qemu-agent-command --domain dev", "is not connected", "--ssh USER@HOST"},
		},
		{"no answer", "virsh", Libvirt{Domain: "dev"}, []answer{{}}, []string{"guest-file-open", "not understood"}},
		{"wrong count", "virsh", Libvirt{Domain: "dev"}, agentAnswers(strings.Replace(agentRead, "33", "4", 1)), []string{"reports 4 bytes and sends 33"}},
		{"wrong answer", "virsh", Libvirt{Domain: "dev"}, agentAnswers(`{"return":{"count":32,"buf-b64":"` + secret + `!"}}`), []string{"guest-file-read", "not understood"}},
		{"option for an instance", "limactl", Lima{"--debug"}, nil, []string{`"--debug"`, "want a name"}},
		{"option for a domain", "virsh", Libvirt{Domain: "-x"}, nil, []string{`"-x"`, "want a name"}},
		{"option for a machine", "podman", Podman{"a b"}, nil, []string{`"a b"`, "want a name"}},
		{"option for a host", "ssh", SSH{"-oProxyCommand=x"}, nil, []string{"want USER@HOST"}},
		{"command for a host", "ssh", SSH{"root@vm;id"}, nil, []string{"want USER@HOST"}},
		{"not installed", "other", Lima{"dev"}, nil, []string{"limactl is not installed here", "--from FILE"}},
	} {
		_, asked := fake(t, c.program, c.answers...)
		_, err := fetched(t, c.channel)
		if err == nil || len(err.Error()) > 2000 {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: no %q in %v", c.name, w, err)
			}
		}
		if ran := asked()[0] != ""; ran != (c.answers != nil) {
			t.Errorf("%s: asked %q", c.name, asked())
		}
	}
	if err := Fetch(t.Context(), Lima{"dev"}, "/a b;id", filepath.Join(t.TempDir(), "t")); err == nil || !strings.Contains(err.Error(), "absolute path") {
		t.Errorf("a path for a shell: %v", err)
	}
}

// A program that does not end is stopped, and the error says after which time.
func TestTimeout(t *testing.T) {
	for name, want := range map[string]string{"deadline": "did not end within 50ms: remedy", "interrupt": "interrupted: remedy"} {
		p := program{path: "/bin/sleep", timeout: 50 * time.Millisecond}
		ctx, cancel := context.WithCancel(t.Context())
		if name == "interrupt" {
			cancel()
		}
		if _, err := p.output(ctx, "remedy", "60"); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
		cancel()
	}
}

// The guest agent closes the file even if the user has interrupted the command.
func TestInterruptedReadClosesTheFile(t *testing.T) {
	dir := t.TempDir()
	script := `#!/bin/sh
case "$*" in
*guest-file-open*) echo '{"return":1000}';;
*guest-file-read*) : >"$0.reading"; exec /bin/sleep 600;;
*guest-file-close*) : >"$0.closed"; echo '{"return":{}}';;
esac
`
	path := filepath.Join(dir, "virsh")
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		for ctx.Err() == nil {
			if _, err := os.Stat(path + ".reading"); err == nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	_, err := Libvirt{Domain: "dev"}.Read(ctx, tokenFile)
	cancel()
	if err == nil || !strings.Contains(err.Error(), "interrupted") {
		t.Error(err)
	}
	if _, err := os.Stat(path + ".closed"); err != nil {
		t.Error(err)
	}
}

// A program that others can change is not run, nor one of the working directory.
func TestProgramOfOthers(t *testing.T) {
	path, asked := fake(t, "limactl", answer{out: secret})
	if err := os.Chmod(path, 0o777); err != nil { //nolint:gosec // the test's matter
		t.Fatal(err)
	}
	if _, err := fetched(t, Lima{"dev"}); err == nil || !strings.Contains(err.Error(), "others can write to it") || asked()[0] != "" {
		t.Errorf("%v, asked %q", err, asked())
	}
	if err := os.Chmod(path, 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	t.Chdir(filepath.Dir(path))
	t.Setenv("PATH", ".")
	if _, err := fetched(t, Lima{"dev"}); err == nil || asked()[0] != "" {
		t.Errorf("%v, asked %q", err, asked())
	}
}

func TestAddressOfADomain(t *testing.T) {
	b, err := os.ReadFile("testdata/domain.xml")
	if err != nil {
		t.Fatal(err)
	}
	definition := string(b)
	const vsock = `<cid auto='yes' address='3'/>`
	for _, c := range []struct{ name, old, now, want string }{
		{"chosen by libvirt", "", "", "3 true"},
		{"fixed", vsock, `<cid auto='no' address='70000'/>`, "70000 false"},
		{"not started", vsock, `<cid auto='yes'/>`, "has no vsock address"},
		{"the host's", vsock, `<cid auto='no' address='2'/>`, "want a number from 3"},
		{"any", vsock, `<cid auto='no' address='4294967295'/>`, "want a number from 3"},
		{"none", vsock, ``, "virsh edit"},
		{"no XML", definition, "error: x", "definition of domain dev"},
		{"something else", definition, "<network/>", "definition of domain dev"},
	} {
		text := definition
		if c.old != "" {
			text = strings.ReplaceAll(text, c.old, c.now)
		}
		_, asked := fake(t, "virsh", answer{out: text})
		cid, auto, err := Libvirt{Domain: "dev"}.CID(t.Context())
		if got := fmt.Sprint(cid, " ", auto, " ", err); !strings.Contains(got, c.want) || asked()[0] != "<--quiet><dumpxml><--domain><dev>" {
			t.Errorf("%s: %s, want %s; asked %q", c.name, got, c.want, asked())
		}
	}
	fake(t, "virsh", answer{err: "error: failed to get domain 'dev'\n", code: 1})
	if _, _, err := (Libvirt{Domain: "dev"}).CID(t.Context()); err == nil || !strings.Contains(err.Error(), "add --libvirt-uri qemu:///system") {
		t.Errorf("no such domain: %v", err)
	}
}

func TestWSL(t *testing.T) {
	for distribution, want := range map[string]string{
		"":         "--user root --exec cat " + tokenFile,
		"Debian 1": "--distribution Debian 1 --user root --exec cat " + tokenFile,
	} {
		var asked string
		got, err := fetched(t, WSL{distribution, func(ctx context.Context, args ...string) ([]byte, error) {
			asked = strings.Join(args, " ")
			if d, ok := ctx.Deadline(); !ok || time.Until(d) < time.Minute {
				t.Errorf("wsl.exe has until %v: it may have to start the distribution", d)
			}
			return []byte(secret + "\n"), nil
		}})
		if err != nil || asked != want || got != secret+"\n" {
			t.Errorf("%q, %v, asked %q, want %q", got, err, asked, want)
		}
	}
	for name, c := range map[string]struct {
		out  string
		err  error
		want string
	}{
		"no agent yet":         {"", errors.New("exit status 1"), "start the agent"},
		"another distribution": {"", errors.New("exit status 1"), "--distribution NAME"},
		"hangs":                {"", fmt.Errorf("wsl.exe: %w", context.DeadlineExceeded), "did not end within 2m0s: try again, or after `wsl --shutdown`"},
		"no such distribution": {"T\x00h\x00e\x00r\x00e\x00 \x00i\x00s\x00 \x00n\x00o\x00n\x00e\x00", errors.New("exit status 1"), "There is none"},
		"no WSL":               {"", &exec.Error{Name: "wsl.exe", Err: exec.ErrNotFound}, "WSL is not installed here"},
	} {
		_, err := fetched(t, WSL{Run: func(context.Context, ...string) ([]byte, error) { return []byte(c.out), c.err }})
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "start the agent") == (name == "no WSL" || name == "hangs") {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := fetched(t, WSL{"Debian", func(context.Context, ...string) ([]byte, error) { return nil, errors.New("exit status 1") }})
	if err == nil || strings.Contains(err.Error(), "--distribution") || !strings.Contains(err.Error(), "in WSL's Debian") {
		t.Errorf("a distribution by its name: %v", err)
	}
}

func TestTake(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := Take(strings.NewReader(secret), file); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(file); err != nil || runtime.GOOS != "windows" && fi.Mode() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	for _, text := range []string{"", "hunter2", secret + " x", strings.Repeat("x", maxToken+1)} {
		if err := Take(strings.NewReader(text), filepath.Join(t.TempDir(), "token")); err == nil {
			t.Errorf("stored %d bytes", len(text))
		}
	}
	if err := Take(strings.NewReader(secret), ""); err == nil {
		t.Error("stored without a file to store it in")
	}
}

func FuzzDomain(f *testing.F) {
	b, err := os.ReadFile("testdata/domain.xml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte("<domain><devices><vsock><cid auto='yes' address='4294967295'/></vsock></devices></domain>"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if cid, _, err := parseDomain("dev", b); err == nil && (cid < 3 || cid == 1<<32-1) {
			t.Errorf("address %d", cid)
		}
	})
}
