// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// mirror makes a mirror of Debian's bookworm and sid, with a kernel of this release, and
// returns the variable that has apt use it.
func mirror(t *testing.T, release string) string {
	t.Helper()
	dir := t.TempDir()
	pool, image, state := filepath.Join(dir, "debian/pool"), filepath.Join(dir, "image"), filepath.Join(dir, "lists")
	for _, d := range []string{pool, filepath.Join(image, "DEBIAN"), filepath.Join(image, "boot"),
		filepath.Join(image, "lib/modules", release), filepath.Join(state, "partial")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{
		filepath.Join(image, "DEBIAN/control"): "Package: linux-image-" + release +
			"\nVersion: 1\nArchitecture: amd64\nMaintainer: nobody <nobody@localhost>\nDescription: none\n",
		filepath.Join(image, "boot/vmlinuz-"+release): "a kernel",
		filepath.Join(dir, "sources.list"):            fmt.Sprintf("deb file:%s/debian bookworm main\n", dir),
		filepath.Join(dir, "apt.conf"): fmt.Sprintf("Dir::Etc::SourceList %q; Dir::Etc::SourceParts \"/dev/null\"; Dir::State::Lists %q; "+
			"Acquire::AllowInsecureRepositories \"true\"; APT::Get::AllowUnauthenticated \"true\"; APT::Sandbox::User \"\";\n",
			filepath.Join(dir, "sources.list"), state),
	} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	script := `dpkg-deb -b image debian/pool/kernel.deb
cd debian
for suite in bookworm sid; do
	packages=main/binary-amd64/Packages
	mkdir -p dists/$suite/main/binary-amd64
	{
		cat ../image/DEBIAN/control
		printf 'Filename: pool/kernel.deb\nSize: %s\nSHA256: %s\n' $(stat -c %s pool/kernel.deb) $(sha256sum <pool/kernel.deb | cut -d ' ' -f 1)
	} >dists/$suite/$packages
	(
		cd dists/$suite
		printf 'Suite: %s\nCodename: %s\nComponents: main\nArchitectures: amd64\nSHA256:\n' $suite $suite
		printf ' %s %s %s\n' $(sha256sum <$packages | cut -d ' ' -f 1) $(stat -c %s $packages) $packages
	) >dists/$suite/Release.new
	mv dists/$suite/Release.new dists/$suite/Release
done
apt-get -qq update
`
	config := "APT_CONFIG=" + filepath.Join(dir, "apt.conf")
	cmd := exec.Command("sh", "-ec", script)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), config)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make a mirror: %v: %s", err, out)
	}
	return config
}

// TestProvisionWithoutASuite proves that a suite that a mirror has no more costs its kernel
// only, and that the script says what to do about it.
func TestProvisionWithoutASuite(t *testing.T) {
	const release = "7.2.13+deb14-cloud-amd64" // which hack/provision.sh pins
	cache := t.TempDir()
	cmd := exec.Command("../../hack/provision.sh", "kernels")
	cmd.Env = append(os.Environ(), "FAIRLEAD_CACHE="+cache, mirror(t, release))
	out, err := cmd.CombinedOutput()
	if err == nil {
		t.Errorf("succeeded without the kernel of bullseye:\n%s", out)
	}
	for _, want := range []string{
		"kernel 5.10 is left out: neither linux-image-5.10.0-", "nor the newest kernel of Debian's bullseye", "have apt use a mirror that has bullseye",
		filepath.Join(cache, "kernels/5.10"), "not all is there: no kernel 5.10 (suite bullseye)\n",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if got, err := os.ReadFile(filepath.Join(cache, "kernels/sid/release")); err != nil || string(got) != release+"\n" {
		t.Errorf("the kernel of sid: %q, %v\n%s", got, err, out)
	}
}
