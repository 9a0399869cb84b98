// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"errors"
	"net"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// A rule of prerouting for the loopback is met by no connection that begins in
// the guest, whether or not the output hook has rules, or a chain at all: its
// destination was decided there. So nothing is published for it. The same rule
// in the output hook is met, and published.
func TestPreroutingLoopbackRuleIgnored(t *testing.T) {
	const (
		legacy = "-p tcp --dport 80 -j REDIRECT --to-ports 9090\n"
		pre    = "chain pre { type nat hook prerouting priority -100; iifname lo tcp dport 80 redirect to :9090; }\n"
		out    = "chain out { type nat hook output priority -100; }\n"
		met    = "chain out { type nat hook output priority -100; tcp dport 80 redirect to :9090; }\n"
		from4  = "tcp 0.0.0.0:80 "
		to4    = " 192.0.2.2:80 127.0.0.1:9090"
		from6  = "tcp [::]:80 "
		to6    = " [2001:db8::2]:80 [::1]:9090"
	)
	iptables := func(rules string) string { return "*nat\n" + rules + "COMMIT\n" }
	nft := []string{"nft", "-f", "-"}
	for _, c := range []struct {
		name      string
		load      []string // reads rules
		rules     string   // never met
		more      string   // is met, beside them
		published []string // then
	}{
		{
			"iptables-nft", []string{"iptables-nft-restore", "-w", "-n"},
			iptables("-A PREROUTING -i lo " + legacy), iptables("-A OUTPUT " + legacy), []string{from4 + "[ip nat]" + to4},
		},
		{
			"ip6tables-nft", []string{"ip6tables-nft-restore", "-w", "-n"},
			iptables("-A PREROUTING -i lo " + legacy), iptables("-A OUTPUT " + legacy), []string{from6 + "[ip6 nat]" + to6},
		},
		{
			"iptables-legacy", []string{"iptables-legacy-restore", "-w", "-n"},
			iptables("-A PREROUTING -i lo " + legacy), iptables("-A OUTPUT " + legacy), []string{from4 + "[legacy ip nat]" + to4},
		},
		{
			"ip6tables-legacy", []string{"ip6tables-legacy-restore", "-w", "-n"},
			iptables("-A PREROUTING -i lo " + legacy), iptables("-A OUTPUT " + legacy), []string{from6 + "[legacy ip6 nat]" + to6},
		},
		{"nft without a chain on output", nft, "table ip t {\n" + pre + "}\n", "table ip t {\n" + met + "}\n", []string{from4 + "[ip t]" + to4}},
		{"nft for IPv6 without a chain on output", nft, "table ip6 t {\n" + pre + "}\n", "table ip6 t {\n" + met + "}\n", []string{from6 + "[ip6 t]" + to6}},
		{
			"nft for both without a chain on output", nft, "table inet t {\n" + pre + "}\n", "table inet t {\n" + met + "}\n",
			[]string{from4 + "[inet t]" + to4, from6 + "[inet t]" + to6},
		},
		{
			"nft with an empty chain on output", nft, "table inet t {\n" + pre + out + "}\n", "add rule inet t out tcp dport 80 redirect to :9090\n",
			[]string{from4 + "[inet t]" + to4, from6 + "[inet t]" + to6},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.listen("0.0.0.0:9090")
			w.listen("[::]:9090")
			published := func() []string {
				src, f, stop := w.start(nat.Options{Methods: []string{nat.MethodGeneration}})
				defer stop()
				eventually(t, "a first set", f.ready)
				return answer(src, f)
			}
			w.run(c.rules, c.load...)
			for _, to := range []string{"127.0.0.1:80", "192.0.2.2:80", "[::1]:80", "[2001:db8::2]:80"} {
				if err := w.connect(to); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("connect to %s: %v, want %v", to, err, unix.ECONNREFUSED)
				}
			}
			if got := published(); len(got) > 0 {
				t.Errorf("published: %q", got)
			}
			w.run(c.more, c.load...)
			met := 0
			for _, to := range []string{"127.0.0.1:80", "192.0.2.2:80", "[::1]:80", "[2001:db8::2]:80"} {
				if w.connect(to) == nil {
					met++
				}
			}
			if want := 2 * len(c.published); met != want {
				t.Errorf("%d connections met the rule of the output hook, want %d", met, want)
			}
			if d := cmp.Diff(c.published, published()); d != "" {
				t.Errorf("with a rule of the output hook (-want +got):\n%s", d)
			}
		})
	}
}

// listen opens a listener in the namespace until the test ends.
func (w *world) listen(at string) {
	w.t.Helper()
	network := "tcp4"
	if at[0] == '[' {
		network = "tcp6"
	}
	err := w.space(func(s *netns.Space) error {
		l, err := s.Listen(network, at)
		if err == nil {
			w.t.Cleanup(func() { _ = l.Close() })
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// connect opens a connection in the namespace and closes it.
func (w *world) connect(to string) error {
	return w.space(func(s *netns.Space) error {
		var c net.Conn
		c, err := s.Dial("tcp", to)
		if err == nil {
			err = c.Close()
		}
		return err
	})
}

func (w *world) space(f func(*netns.Space) error) error {
	s, err := netns.Open(w.path())
	if err != nil {
		return err
	}
	return errors.Join(f(s), s.Close())
}
