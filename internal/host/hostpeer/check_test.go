// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/status"
)

// What is refused when it is checked is what a host peer would not start with. A check
// leaves nothing behind.
func TestCheckRefusesWhatDoesNotStart(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = busy.Close() }()
	taken := filepath.Join(t.TempDir(), "s")
	other, err := status.ListenControl(taken)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	for _, c := range []struct {
		flags    []string
		replaces bool
		want     string // part of the error; empty for none
	}{
		{nil, false, ""},
		{[]string{"--connect", "vsock://3:1023"}, false, " with --libvirt, --ssh or another flag"},
		{[]string{"--metrics-addr", "127.0.0.1:0", "--web-addr", "127.0.0.1:0"}, false, ""},
		{[]string{"--metrics-addr", busy.Addr().String()}, false, "choose another --metrics-addr"},
		{[]string{"--metrics-addr", busy.Addr().String()}, true, ""},
		{[]string{"--metrics-addr", "192.0.2.1:9464"}, false, "choose another --metrics-addr"},
		{[]string{"--metrics-addr", "192.0.2.1:9464"}, true, "choose another --metrics-addr"},
		{[]string{"--web-addr", busy.Addr().String()}, false, "choose another --web-addr"},
		{[]string{"--listen", "wss://127.0.0.1:0", "--guest", "a", "--cert", "/nonexistent/c", "--key", "/nonexistent/k"}, false, "certificate"},
		{[]string{"--control", taken}, false, "in use by a running fairlead"},
		{[]string{"--control", taken}, true, ""},
	} {
		t.Run(strings.Join(c.flags, " "), func(t *testing.T) {
			dir := t.TempDir()
			if len(c.flags) > 0 && c.flags[0] == "--listen" {
				if err := os.WriteFile(filepath.Join(dir, "a.token"), []byte(strings.Repeat("ab", 32)+"\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("HOME", dir)
			t.Setenv("XDG_STATE_HOME", dir)
			fs := pflag.NewFlagSet("host", pflag.ContinueOnError)
			new(config.Host).Flags(fs)
			args := append([]string{"--control", filepath.Join(dir, "run", "s"), "--link-token", filepath.Join(dir, "a.token"), "--connect", "unix://" + dir + "/link"}, c.flags...)
			if len(c.flags) == 0 || c.flags[0] != "--connect" && c.flags[0] != "--listen" { // a unix link needs none
				args = append(args, "--link-token", "")
			}
			if err := fs.Parse(args); err != nil {
				t.Fatal(err)
			}
			cfg, err := config.LoadHost("/dev/null", fs, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := Check(t.Context(), cfg, c.replaces); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			left, err := filepath.Glob(filepath.Join(dir, "*", "*"))
			if err != nil || len(left) > 0 {
				t.Errorf("left behind: %q, %v", left, err)
			}
		})
	}
}
