// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakeProgram puts a program into PATH, alone, that runs a script.
func fakeProgram(t *testing.T, name, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o700); err != nil {
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
		{"--lima dev", "limactl", "echo " + token, "token", "Next: fairlead host install -- --connect vsock://CID:1023\n"},
		{"--ssh root@vm --guest lab", "ssh", "echo " + token, "lab.token", "--connect lab=vsock://CID:1023\n"},
	} {
		file := filepath.Join(t.TempDir(), c.file)
		fakeProgram(t, c.program, c.script)
		out, stderr, code := execute(t, append([]string{"host", "pair", "--link-token", file}, strings.Fields(c.args)...)...)
		next := strings.Replace(c.next, "\n", " --link-token "+file+"\n", 1)
		if code != exitOK || !strings.HasPrefix(out, "Token stored in "+file+".\n") || !strings.HasSuffix(out, next) {
			t.Errorf("%s: exit %d, %q, %q; want %q", c.args, code, out, stderr, next)
		}
		if b, err := os.ReadFile(file); err != nil || string(b) != token+"\n" {
			t.Errorf("%s: %q, %v", c.args, b, err)
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
