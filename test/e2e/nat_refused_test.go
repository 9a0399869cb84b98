// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// An agent that may not read the rules reports that, and everything else works. The
// incumbent exits when iptables fails.
func TestUnprivilegedRulesAreStale(t *testing.T) {
	r := newRig(t, "--observer", "poll", "--poll-interval", "50ms", "--source", "socket,nat")
	// The folders of the link and of the control socket belong to the user that serves
	// them.
	for _, dir := range []string{filepath.Dir(r.agentCtl), r.dir + "/link"} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(dir, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	for dir := r.dir; len(dir) > len(os.TempDir()); dir = filepath.Dir(dir) {
		_ = os.Chmod(dir, 0o755)
	}
	r.guest.sh(t, `nft -f - <<'END'
table ip t { chain pre { type nat hook prerouting priority -100; tcp dport 8081 dnat to 10.88.0.2:80; }; }
END`)
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:7000"))
	args := append([]string{"agent", "--link", r.link, "--control", r.agentCtl}, r.agentFlags...)
	r.agent = r.guest.startAs(t, 65534, args...)
	r.eventually("the sources' states", func() error {
		// Control sockets of others are not believed, so its own user asks.
		p := r.guest.startAs(t, 65534, "ls", "-a", "-o", "json", "--control", r.agentCtl)
		<-p.Done()
		var l status.List
		if err := json.Unmarshal([]byte(p.Output()), &l); err != nil {
			return fmt.Errorf("%w: %s", err, p.Output())
		}
		if !slices.ContainsFunc(l.Publications, func(p status.Publication) bool { return p.Key.String() == "tcp 127.0.0.1:7000" }) {
			return errors.New("the socket is not there")
		}
		for _, s := range l.Sources {
			if s.Name == "nat" && s.State == "stale" && s.Error != "" {
				return nil
			}
		}
		return errors.New("the NAT source is not stale")
	})
}
