// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package bench

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkChange measures one change after quiet: from the call of listen(2) and of close(2) to
// the message on the link, beside a raw reader of the same events, in turns.
func BenchmarkChange(b *testing.B) {
	g, r := linked(b), newRaw(b)
	var opened, closed, rawOpened, rawClosed []time.Duration
	n := of(300, 5)
	before := used(b, g.agent).Switches
	for i := range n {
		o, c := g.sample(firstPort + i)
		opened, closed = append(opened, o), append(closed, c)
	}
	switches := float64(used(b, g.agent).Switches-before) / float64(2*n)
	for i := range n {
		o, c := g.sample(firstPort + i)
		opened, closed = append(opened, o), append(closed, c)
		o, c = r.sample(b, firstPort+i)
		rawOpened, rawClosed = append(rawOpened, o), append(rawClosed, c)
	}
	compared := func(ours, price []time.Duration) map[string]float64 {
		m := make(map[string]float64)
		for name, q := range map[string]float64{"p50": 0.5, "p99": 0.99} {
			own, raw := quantile(ours, q).Seconds(), quantile(price, q).Seconds()
			m[name+"-sec"], m["raw-"+name+"-sec"], m[name+"/raw"] = own, raw, own/raw
		}
		return m
	}
	b.Run("listen", func(b *testing.B) { metrics(b, compared(opened, rawOpened)) })
	b.Run("close", func(b *testing.B) { metrics(b, compared(closed, rawClosed)) })
	b.Run("switches", func(b *testing.B) { metrics(b, map[string]float64{"switches/change": switches}) })
}

// sample opens a listener and closes it, and returns how long each message took.
func (g *guest) sample(p int) (opened, closed time.Duration) {
	pause()
	wait := g.peer.expect(key(p), false)
	fd, at := g.open(p)
	opened = wait(g.b).Sub(at)
	pause()
	wait = g.peer.expect(key(p), true)
	at = time.Now()
	_ = unix.Close(fd)
	return opened, wait(g.b).Sub(at)
}

// BenchmarkCPU measures the agent's CPU time for one change at rates of changes a second.
func BenchmarkCPU(b *testing.B) {
	for _, rate := range []int{1, 100, 10_000} {
		b.Run(fmt.Sprint("rate=", rate), func(b *testing.B) {
			g := linked(b)
			total := max(2, int(of(10*time.Second, time.Second).Seconds())*rate)
			before := used(b, g.agent).CPU
			g.change(rate, total)
			g.peer.settle(b, len(g.fds))
			metrics(b, map[string]float64{"CPU-sec/change": (used(b, g.agent).CPU - before).Seconds() / float64(total)})
		})
	}
}

// change opens and closes listeners at a rate; a hundred stay open, or one where changes are rare.
func (g *guest) change(rate, total int) {
	check(g.b, g.space.Do(func() error {
		begin := time.Now()
		for i, next := 0, 0; i < total; {
			// Several changes may be due at once, because a sleep takes a millisecond.
			for due := min(total, 1+int(float64(rate)*time.Since(begin).Seconds())); i < due; i++ {
				if len(g.fds) > 100 || i%2 == 1 && rate < 100 {
					_ = unix.Close(g.fds[0])
					g.fds = g.fds[1:]
					continue
				}
				fd, _, err := listen(firstPort+next%20_000, false)
				if err != nil {
					return err
				}
				g.fds, next = append(g.fds, fd), next+1
			}
			time.Sleep(max(time.Millisecond, time.Until(begin.Add(time.Duration(i)*time.Second/time.Duration(rate)))))
		}
		return nil
	}))
}

// BenchmarkBurst opens many listeners at once beside a new agent, none of which may be lost.
func BenchmarkBurst(b *testing.B) {
	for _, n := range []int{2000, 10_000} {
		b.Run(fmt.Sprint("listeners=", n), func(b *testing.B) {
			g := linked(b)
			n := of(n, 100)
			before := used(b, g.agent).CPU
			ended := g.fill(firstPort, n, false)
			last := g.peer.settle(b, n)
			time.Sleep(200 * time.Millisecond) // acknowledgements
			metrics(b, map[string]float64{
				"last-sec": last.Sub(ended).Seconds(), "CPU-sec": (used(b, g.agent).CPU - before).Seconds(),
			})
		})
	}
}

// BenchmarkStart measures from the start of the agent until it has reported one port.
func BenchmarkStart(b *testing.B) {
	var took, cpu []time.Duration
	for range of(12, 1) {
		g := newGuest(b)
		g.fill(firstPort, 1, false)
		began := time.Now()
		g.startAgent()
		eventually(b, time.Millisecond, func() (err error) { g.peer, err = dialPeer(b, g.link()); return err })
		took = append(took, g.peer.settle(b, 1).Sub(began))
		cpu = append(cpu, used(b, g.agent).CPU)
		g.agent.Stop(unix.SIGTERM)
	}
	metrics(b, map[string]float64{"reported-sec": quantile(took, 0.5).Seconds(), "CPU-sec": quantile(cpu, 0.5).Seconds()})
}

// BenchmarkBinary is the size of the stripped program.
func BenchmarkBinary(b *testing.B) {
	metrics(b, map[string]float64{"size-B": float64(must(os.Stat(fairlead(b)))(b).Size())})
}

// BenchmarkElements measures the agent beside a program that adds 1,000 elements a second to a set
// of a table without NAT, each in a commit of its own.
func BenchmarkElements(b *testing.B) {
	g := linked(b)
	seconds := of(10, 1)
	lines := exec.Command("sh", "-c", fmt.Sprintf(`echo 'add table inet other; add set inet other s { type ipv4_addr; }'
for i in $(seq %d); do
	for j in 0 1 2 3 4 5 6 7 8 9; do echo "add element inet other s { 10.0.$((i / 25)).$((i %% 25 * 10 + j)) }"; done
	sleep 0.01
done`, 100*seconds))
	out, in := pipe(b)
	lines.Stdout = in
	writer := exec.Command("nft", "-i")
	writer.Stdin = out
	before := used(b, g.agent).CPU
	check(b, lines.Start())
	check(b, g.space.Start(writer))
	_, _ = out.Close(), in.Close()
	check(b, lines.Wait())
	check(b, writer.Wait())
	time.Sleep(200 * time.Millisecond) // for what is still on its way
	wrote := writer.ProcessState.UserTime() + writer.ProcessState.SystemTime()
	metrics(b, map[string]float64{"agent/writer": float64(used(b, g.agent).CPU-before) / float64(wrote)})
	check(b, g.space.Do(func() error {
		text, err := exec.Command("nft", "list", "set", "inet", "other", "s").Output()
		if n := strings.Count(string(text), "10.0."); err == nil && n < 500*seconds {
			err = fmt.Errorf("only %d elements were added", n)
		}
		return err
	}))
}

func pipe(b *testing.B) (out, in *os.File) {
	out, in, err := os.Pipe()
	check(b, err)
	return out, in
}
