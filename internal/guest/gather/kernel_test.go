// SPDX-License-Identifier: Apache-2.0

//go:build linux

package gather

import (
	"bytes"
	"compress/gzip"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

func TestKernelConfig(t *testing.T) {
	const text = "#\n# Linux\n#\nCONFIG_BPF_SYSCALL=y\n# CONFIG_KPROBES is not set\nCONFIG_CGROUP_BPF=y\nCONFIG_LSM=\"a=b\"\n"
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	if _, err := z.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	for file, body := range map[string][]byte{
		"/proc/config.gz": zipped.Bytes(), "/boot/config-6.1-x": []byte(text), "/lib/modules/6.1-x/config": []byte(text),
	} {
		root := t.TempDir()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, file)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, file), body, 0o600); err != nil {
			t.Fatal(err)
		}
		set, from := kernelConfig(root, "6.1-x")
		if from != file || !maps.Equal(set, map[string]string{"CONFIG_BPF_SYSCALL": "y", "CONFIG_CGROUP_BPF": "y"}) {
			t.Errorf("%s: %q from %q", file, set, from)
		}
		if set, from := kernelConfig(root, "6.1-y"); file != "/proc/config.gz" && (set != nil || from != "") {
			t.Errorf("%s is of another kernel: %q from %q", file, set, from)
		}
	}
	if set, err := readConfig(filepath.Join(t.TempDir(), "absent")); err == nil {
		t.Errorf("an absent file has %q", set)
	}
}

func TestKernelConfigBroken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.gz")
	for _, body := range []string{"", "CONFIG_KPROBES=y\n", "\x1f\x8b\x08\x00broken"} {
		if err := os.WriteFile(file, []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
		if set, err := readConfig(file); err == nil {
			t.Errorf("%q: no error, %q", body, set)
		}
	}
}

func TestChosenMode(t *testing.T) {
	for text, want := range map[string]string{
		"[none] integrity confidentiality\n": "none", "none integrity [confidentiality]\n": "confidentiality", "": "", "none\n": "",
	} {
		if got := chosen(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}
