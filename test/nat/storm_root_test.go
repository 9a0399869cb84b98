// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/source/nat"
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

// oracle returns what the tools' own listings mean: for each port the first DNAT.
func oracle(t *testing.T, w *world) []string {
	t.Helper()
	var list struct {
		Nftables []struct {
			Rule *struct {
				Chain string
				Expr  []map[string]json.RawMessage
			}
			Set *struct {
				Name string
				Elem []any
			}
			Map *struct {
				Name string
				Elem [][]json.RawMessage
			}
		}
	}
	if err := json.Unmarshal([]byte(w.run("", "nft", "-j", "list", "ruleset")), &list); err != nil {
		t.Fatal(err)
	}
	type rule []map[string]json.RawMessage
	chains := map[string][]rule{}
	ports := map[int]bool{}
	verdicts := map[int]map[string]json.RawMessage{}
	for _, o := range list.Nftables {
		switch {
		case o.Rule != nil:
			chains[o.Rule.Chain] = append(chains[o.Rule.Chain], o.Rule.Expr)
		case o.Set != nil:
			for _, e := range o.Set.Elem {
				ports[int(e.(float64))] = true
			}
		case o.Map != nil:
			for _, e := range o.Map.Elem {
				var p int
				var v map[string]json.RawMessage
				if json.Unmarshal(e[0], &p) != nil || json.Unmarshal(e[1], &v) != nil {
					t.Fatalf("element %s", e)
				}
				verdicts[p] = v
			}
		}
	}
	// walk returns what decides: a target, "accept", or "" when the chain ends.
	var walk func(chain string, port int) string
	verdict := func(v map[string]json.RawMessage, port int) (result string, stop bool) {
		var to struct{ Target string }
		for kind, body := range v {
			switch kind {
			case "jump", "goto":
				_ = json.Unmarshal(body, &to)
				r := walk(to.Target, port)
				return r, r != "" || kind == "goto"
			case "accept":
				return "accept", true
			case "return":
				return "", true
			}
		}
		return "", false
	}
	walk = func(chain string, port int) string {
	rules:
		for _, r := range chains[chain] {
			for _, e := range r {
				if m, ok := e["match"]; ok {
					var c struct{ Right json.RawMessage }
					_ = json.Unmarshal(m, &c)
					var n int
					if json.Unmarshal(c.Right, &n) == nil && n != port || string(c.Right) == `"@ports"` && !ports[port] {
						continue rules
					}
				} else if d, ok := e["dnat"]; ok {
					var to struct {
						Addr string
						Port int
					}
					_ = json.Unmarshal(d, &to)
					return fmt.Sprintf("%s:%d", to.Addr, to.Port)
				} else if _, ok := e["vmap"]; ok {
					if res, stop := verdict(verdicts[port], port); stop {
						return res
					}
					continue rules
				} else if res, stop := verdict(e, port); stop {
					return res
				}
			}
		}
		return ""
	}
	var out []string
	for p := 1000; p < 1030; p++ {
		if to := walk("pre", p); to != "" && to != "accept" {
			out = append(out, fmt.Sprintf("tcp 0.0.0.0:%d [ip storm] %s", p, to))
		}
	}
	seen := map[string]bool{}
	for line := range strings.Lines(w.run("", "iptables-legacy-save", "-t", "nat")) {
		f := strings.Fields(line)
		if len(f) < 12 || f[1] != "PREROUTING" || seen[f[7]] {
			continue
		}
		seen[f[7]] = true
		out = append(out, fmt.Sprintf("tcp 0.0.0.0:%s [legacy ip nat] %s:%s", f[7], f[11], f[7]))
	}
	slices.Sort(out)
	return out
}

// Sources that start at any moment of a storm of changes end equal to what nft
// and iptables-legacy list.
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
		want := oracle(t, w)
		for len(want) == 0 { // which every source finds
			s.step()
			want = oracle(t, w)
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
				t.Errorf("round %d, source %d on %s (-oracle +source):\n%s\n%s", round, i, x.method, cmp.Diff(want, got), w.run("", "nft", "list", "ruleset"))
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
