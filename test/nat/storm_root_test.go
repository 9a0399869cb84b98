// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
)

// storm makes random changes with nft and iptables-legacy.
type storm struct {
	w *world
	r *rand.Rand
}

func (s *storm) port() int { return 1000 + s.r.IntN(30) }

func (s *storm) dnat() string {
	return fmt.Sprintf("dnat to 10.0.0.%d:%d", 1+s.r.IntN(3), 80+s.r.IntN(3))
}

func (s *storm) rule() string {
	switch s.r.IntN(9) {
	case 0:
		return "jump c" + strconv.Itoa(s.r.IntN(3))
	case 1:
		return fmt.Sprintf("tcp dport %d return", s.port())
	case 2:
		return fmt.Sprintf("tcp dport %d accept", s.port())
	case 3:
		return "tcp dport @ports " + s.dnat()
	case 4:
		return "tcp dport vmap @verdicts"
	}
	return fmt.Sprintf("tcp dport %d %s", s.port(), s.dnat())
}

const fresh = `add table ip storm
add chain ip storm c0
add chain ip storm c1
add chain ip storm c2
add set ip storm ports { type inet_service; }
add map ip storm verdicts { type inet_service : verdict; }
add chain ip storm pre { type nat hook prerouting priority -100; }
add rule ip storm pre jump c0
`

// step is one commit; one that the kernel refuses is as good as any.
func (s *storm) step() {
	if s.r.IntN(4) == 0 {
		s.legacy()
		return
	}
	var b strings.Builder
	for range 1 + s.r.IntN(4) {
		chain := []string{"pre", "c0", "c1", "c2"}[s.r.IntN(4)]
		switch s.r.IntN(12) {
		case 0:
			fmt.Fprintf(&b, "add element ip storm ports { %d }\n", s.port())
		case 1:
			fmt.Fprintf(&b, "delete element ip storm ports { %d }\n", s.port())
		case 2:
			fmt.Fprintf(&b, "add element ip storm verdicts { %d : %s }\n", s.port(), []string{"goto c1", "jump c2", "goto c2", "accept"}[s.r.IntN(4)])
		case 3:
			fmt.Fprintf(&b, "flush chain ip storm %s\n", chain)
		case 4:
			if s.r.IntN(6) == 0 {
				b.WriteString("add table ip storm\ndelete table ip storm\n" + fresh)
			}
		case 5:
			if s.r.IntN(3) == 0 {
				b.WriteString("flush map ip storm verdicts\n")
			}
		case 6, 7:
			if rules := s.handles(chain); len(rules) > 0 {
				h := rules[s.r.IntN(len(rules))]
				switch s.r.IntN(3) {
				case 0:
					fmt.Fprintf(&b, "delete rule ip storm %s handle %s\n", chain, h)
				case 1:
					fmt.Fprintf(&b, "replace rule ip storm %s handle %s %s\n", chain, h, s.rule())
				default:
					fmt.Fprintf(&b, "insert rule ip storm %s position %s %s\n", chain, h, s.rule())
				}
			}
		case 8:
			fmt.Fprintf(&b, "insert rule ip storm %s %s\n", chain, s.rule())
		default:
			fmt.Fprintf(&b, "add rule ip storm %s %s\n", chain, s.rule())
		}
	}
	_, _ = try(b.String(), "ip", "netns", "exec", s.w.name, "nft", "-f", "-")
}

func (s *storm) handles(chain string) []string {
	out, _ := try("", "ip", "netns", "exec", s.w.name, "nft", "-a", "list", "chain", "ip", "storm", chain)
	var hs []string
	for line := range strings.Lines(out) {
		if rule, h, ok := strings.Cut(line, "# handle "); ok && !strings.Contains(rule, "{") {
			hs = append(hs, strings.TrimSpace(h))
		}
	}
	return hs
}

func (s *storm) legacy() {
	op := []string{"-A", "-A", "-I", "-D"}[s.r.IntN(4)]
	args := []string{"ip", "netns", "exec", s.w.name, "iptables-legacy", "-w", "-t", "nat", op, "PREROUTING", "-p", "tcp",
		"--dport", strconv.Itoa(2000 + s.r.IntN(8)), "-j", "DNAT", "--to-destination", fmt.Sprintf("10.0.1.%d", 1+s.r.IntN(2))}
	if s.r.IntN(15) == 0 {
		args = append(args[:8:8], "-F")
	}
	_, _ = try("", args...)
}

// read returns what a source publishes that starts now.
func (w *world) read() []string {
	w.t.Helper()
	_, f, stop := w.start(nat.Options{Methods: []string{nat.MethodGeneration}})
	defer stop()
	eventually(w.t, "a first set", f.ready)
	return f.lines()
}

// Sources that start at any moment of a storm of changes end equal to one that starts after
// it. What rules mean, TestCorpus and test/packets decide.
func TestStorm(t *testing.T) {
	const perRound = 10
	n := rounds.Of(t, "FAIRLEAD_STORMS", 20)
	w := newWorld(t)
	w.run(fresh, "nft", "-f", "-")
	s := &storm{w: w, r: rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))}
	starts, lines, lost := 0, 0, uint64(0)
	for round := range n {
		var all []running
		for i := range perRound {
			all = append(all, w.launch(methods()[i%len(methods())]))
			for range s.r.IntN(4) {
				s.step()
			}
		}
		for range 10 {
			s.step()
		}
		want := w.read()
		for len(want) == 0 { // which every source finds
			s.step()
			want = w.read()
		}
		lines += len(want)
		for i, x := range all {
			var got []string
			ok := false
			for end := time.Now().Add(patience); time.Now().Before(end) && !ok; time.Sleep(2 * time.Millisecond) {
				got = x.feed.lines()
				ok = x.feed.ready() && slices.Equal(got, want)
			}
			if !ok {
				t.Errorf("round %d, source %d on %s (-fresh +source):\n%s\n%s", round, i, x.method, cmp.Diff(want, got), w.run("", "nft", "list", "ruleset"))
			}
			x.stop()
			st := x.src.Status()
			if st.Drift != 0 {
				t.Errorf("round %d, source %d on %s: an audit repaired %d objects", round, i, x.method, st.Drift)
			}
			lost += st.Lost
			starts++
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%d starts, %d publications, %d times read anew", starts, lines, lost)
}

// launch starts a source and waits for nothing.
func (w *world) launch(m method) running {
	log := slog.New(slog.NewTextHandler(w.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})).With("source", m)
	opt := nat.Options{Log: log, Methods: []string{m.nft}, LegacyPoll: 20 * time.Millisecond, Audit: time.Second}
	if m.filter {
		opt.Filter = w.filter()
	}
	src, f, stop := w.start(opt)
	return running{m.String(), src, f, stop}
}
