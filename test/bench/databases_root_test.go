// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package bench

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/program"
)

// nobody runs what refuses to run as root.
var nobody = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}

// database is a server in a guest, and its own benchmark, which prints a rate.
type database struct {
	*guest
	rate   *regexp.Regexp
	client func(clients int) *exec.Cmd
}

// BenchmarkPostgreSQL has pgbench select through the link and in the guest, in turns.
func BenchmarkPostgreSQL(b *testing.B) {
	servers, _ := filepath.Glob("/usr/lib/postgresql/*/bin") // the pattern is valid
	if len(servers) == 0 {
		b.Fatal("PostgreSQL is missing: run hack/provision-engines.sh databases")
	}
	bin, g := servers[0], newGuest(b)
	data := filepath.Join(g.dir, "data")
	check(b, os.MkdirAll(data, 0o700))
	check(b, os.Chown(data, 65534, 65534))
	check(b, os.Chmod(g.dir, 0o755))
	start := func(name string, args ...string) *exec.Cmd {
		cmd := exec.Command(filepath.Join(bin, name), args...)
		cmd.SysProcAttr, cmd.Env, cmd.Dir = nobody, append(os.Environ(), "LC_ALL=C.UTF-8", "HOME=/", "TZ=UTC"), "/"
		return cmd
	}
	run(b, g.space, start("initdb", "-D", data, "-U", "bench", "-A", "trust", "--no-sync"))
	program.Start(b, program.Command{In: g.space, End: syscall.SIGINT, Cmd: start("postgres", "-D", data, "-k", data,
		"-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "max_connections=200")})
	connect := []string{"-h", "127.0.0.1", "-U", "bench"}
	eventually(b, 100*time.Millisecond, func() error {
		return g.space.Do(func() error { return start("pgbench", append(connect, "-i", "-q", "postgres")...).Run() })
	})
	d := database{g, regexp.MustCompile(`tps = ([0-9.]+)`), func(clients int) *exec.Cmd {
		return start("pgbench", append(connect, "-S", "-n", "-j", "2", "-c", strconv.Itoa(clients), "-T", strconv.Itoa(of(5, 1)), "postgres")...)
	}}
	d.measure(b, "5432", 8, 100)
}

// BenchmarkRedis has redis-benchmark get a key through the link and in the guest, in turns.
func BenchmarkRedis(b *testing.B) {
	g := newGuest(b)
	program.Start(b, program.Command{In: g.space, Cmd: exec.Command("redis-server", "--port", "6379", "--bind", "127.0.0.1", "--save", "")})
	d := database{g, regexp.MustCompile(`GET: ([0-9.]+) requests`), func(clients int) *exec.Cmd {
		return exec.Command("redis-benchmark", "-q", "-t", "get", "-c", strconv.Itoa(clients), "-n", strconv.Itoa(of(200_000, 1000)))
	}}
	d.measure(b, "6379", 8, 100)
}

// measure starts the link and compares rates for numbers of clients.
func (d database) measure(b *testing.B, port string, clients ...int) {
	d.startAgent()
	d.startHost()
	eventually(b, 50*time.Millisecond, func() error {
		c, err := d.outside.Dial("tcp4", "127.0.0.1:"+port)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	for _, n := range clients {
		b.Run(fmt.Sprint("clients=", n), func(b *testing.B) {
			rate := func(in *netns.Space) float64 {
				out := run(b, in, d.client(n))
				m := d.rate.FindStringSubmatch(out)
				if m == nil {
					b.Fatalf("no rate in %s", out)
				}
				return must(strconv.ParseFloat(m[1], 64))(b)
			}
			direct, link := rate(d.space), rate(d.outside)
			metrics(b, map[string]float64{"direct/s": direct, "link/s": link, "link/direct": link / direct})
		})
	}
}

// run runs a command in a namespace and returns its output.
func run(b *testing.B, in *netns.Space, cmd *exec.Cmd) (out string) {
	check(b, in.Do(func() error {
		text, err := cmd.CombinedOutput()
		if out = string(text); err != nil {
			err = fmt.Errorf("%s: %w: %s", cmd, err, text)
		}
		return err
	}))
	return out
}
