// SPDX-License-Identifier: Apache-2.0

package config

import (
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"
)

func TestFlagThatIsTrueNeedsNoValue(t *testing.T) {
	for args, want := range map[string]bool{"--listener-udp": true, "--listener-udp=no": false} {
		var c Agent
		fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		c.Flags(fs)
		if err := fs.Parse([]string{args}); err != nil {
			t.Fatal(err)
		}
		c, err := LoadAgent(write(t, filepath.Join(t.TempDir(), "c.yaml"), "listener: {udp: true}"), fs, nil)
		if err != nil {
			t.Fatal(err)
		}
		if c.Listener.UDP != want {
			t.Errorf("%s: %v, want %v", args, c.Listener.UDP, want)
		}
	}
}
