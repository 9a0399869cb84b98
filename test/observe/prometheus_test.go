// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package observe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
)

const (
	rulesFile     = "../../deploy/prometheus/fairlead.rules.yaml"
	rulesTest     = "../../deploy/prometheus/fairlead.test.yaml"
	exampleConfig = "../../deploy/prometheus/prometheus.yaml"
	dashboardFile = "../../deploy/grafana/fairlead.json"
	document      = "../../docs/metrics.md"
	prometheusAt  = "127.0.0.1:9090"
)

// client returns an HTTP client of the namespace.
func client(s *netns.Space) *http.Client {
	return &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, addr string) (net.Conn, error) {
			return s.Dial(network, addr)
		},
	}}
}

func get(t *testing.T, c *http.Client, url string) (string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s: %s", resp.Status, b)
	}
	return string(b), err
}

func TestAlertRules(t *testing.T) {
	promtool := tool(t, "promtool")
	if out, err := command(t, nil, promtool, "check", "rules", rulesFile); err != nil {
		t.Errorf("check rules: %v\n%s", err, out)
	}
	if out, err := command(t, nil, promtool, "test", "rules", rulesTest); err != nil {
		t.Errorf("test rules: %v\n%s", err, out)
	}
	if out, err := command(t, nil, promtool, "check", "config", exampleConfig); err != nil {
		t.Errorf("check config: %v\n%s", err, out)
	}
}

// An alert without a test may never fire, or always.
func TestEveryAlertIsTested(t *testing.T) {
	rules, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile(rulesTest)
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`(?m)- alert: (\w+)`).FindAllStringSubmatch(string(rules), -1)
	if len(names) == 0 {
		t.Fatal("no alerts")
	}
	for _, n := range names {
		if !strings.Contains(string(tests), n[1]) {
			t.Errorf("%s is in no test", n[1])
		}
	}
}

// load opens and closes ports and carries bytes until the test ends.
func (r *rig) load() {
	r.t.Helper()
	for p := 8001; p <= 8010; p++ {
		r.listen(fmt.Sprintf("0.0.0.0:%d", p))
	}
	taken, err := r.outside.Listen("tcp", "127.0.0.1:8100") // a conflict
	if err != nil {
		r.t.Fatal(err)
	}
	r.listen("127.0.0.1:8100")
	udp, err := r.guest.ListenPacket("udp", "127.0.0.1:8200")
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	r.t.Cleanup(func() { cancel(); _ = taken.Close(); _ = udp.Close(); wg.Wait() })
	wg.Go(func() { echo.ServePackets(udp) })
	each := func(pause time.Duration, f func(i int)) {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				f(i)
				select {
				case <-ctx.Done():
				case <-time.After(pause):
				}
			}
		})
	}
	each(100*time.Millisecond, func(i int) { // ports that come and go
		if l, err := r.guest.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 9000+i%50)); err == nil {
			time.Sleep(20 * time.Millisecond)
			_ = l.Close()
		}
	})
	each(100*time.Millisecond, func(i int) { // flows
		c, err := r.outside.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", 8001+i%10))
		if err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		b := make([]byte, 16<<10)
		if _, err := c.Write(b); err == nil {
			_, _ = io.ReadFull(c, b)
		}
	})
	each(200*time.Millisecond, func(int) {
		c, err := r.outside.Dial("udp", "127.0.0.1:8200")
		if err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Second))
		if _, err := c.Write([]byte("ping")); err == nil {
			_, _ = c.Read(make([]byte, 100))
		}
	})
}

// startPrometheus scrapes the rig once a second and returns what asks it.
func (r *rig) startPrometheus() func(query string) ([]sample, error) {
	r.t.Helper()
	relay(r.t, r.guest, r.outside, hostMetrics)
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		r.t.Fatal(err)
	}
	config := filepath.Join(r.dir, "prometheus.yml")
	text := fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%q]\nscrape_configs:\n"+
		"- job_name: fairlead\n  static_configs: [{targets: [%q, %q]}]\n", rules, agentMetrics, hostMetrics)
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		r.t.Fatal(err)
	}
	start(r.t, r.guest, exec.Command(tool(r.t, "prometheus"), "--config.file", config, "--web.listen-address", prometheusAt,
		"--storage.tsdb.path", filepath.Join(r.dir, "tsdb"), "--log.level", "warn"))
	c := client(r.guest)
	return func(query string) ([]sample, error) {
		text, err := get(r.t, c, "http://"+prometheusAt+"/api/v1/query?query="+url.QueryEscape(query))
		if err != nil {
			return nil, err
		}
		var answer struct {
			Data struct{ Result []sample }
		}
		return answer.Data.Result, json.Unmarshal([]byte(text), &answer)
	}
}

type sample struct {
	Metric map[string]string
	Value  [2]any
}

// queries returns every expression of the dashboard with its variables filled in.
func queries(t *testing.T) map[string]string {
	t.Helper()
	b, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
		Annotations struct {
			List []struct{ Name, Expr string }
		}
	}
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	fill := strings.NewReplacer("$__rate_interval", "30s", "$instance", ".+")
	all := map[string]string{}
	for _, p := range d.Panels {
		for i, target := range p.Targets {
			all[fmt.Sprintf("%s/%d", p.Title, i)] = fill.Replace(target.Expr)
		}
	}
	if len(all) < 30 {
		t.Fatalf("%d queries in the dashboard", len(all))
	}
	return all
}

func TestDashboardAndAlertsOnARealPrometheus(t *testing.T) {
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(policy, []byte("rules: []"), 0o600); err != nil {
		t.Fatal(err)
	}
	// No server takes its inventory.
	r := newRig(t, "--audit-interval", "10s", "--cluster-inventory", "--cluster-node-name", "vm", "--cluster-policy", policy)
	r.hostFlags = []string{"--names", "127.0.0.1:8000"}
	r.start()
	r.load()
	ask := r.startPrometheus()

	for name, query := range queries(t) {
		wait.Within(t, limit(), fmt.Sprintf("%s: %s has data", name, query), func() error {
			samples, err := ask(query)
			if err != nil {
				return err
			}
			for _, s := range samples {
				if s.Value[1] != "NaN" {
					return nil
				}
			}
			return fmt.Errorf("%v", samples)
		})
	}
	// The restart annotation has data only after a restart.
	wait.Within(t, limit(), "the annotation is understood", func() error {
		_, err := ask(`changes(process_start_time_seconds{instance=~".+",job="fairlead"}[2m]) > 0`)
		return err
	})

	wait.Within(t, limit(), "all alerts are evaluated", func() error {
		text, err := get(t, client(r.guest), "http://"+prometheusAt+"/api/v1/rules")
		if err != nil {
			return err
		}
		var rules struct {
			Data struct {
				Groups []struct {
					Rules []struct{ Name, Health, LastError string }
				}
			}
		}
		if err := json.Unmarshal([]byte(text), &rules); err != nil {
			return err
		}
		if len(rules.Data.Groups) != 1 {
			return fmt.Errorf("groups: %s", text)
		}
		for _, rule := range rules.Data.Groups[0].Rules {
			if rule.Health != "ok" {
				return fmt.Errorf("alert %s: %s %s", rule.Name, rule.Health, rule.LastError)
			}
		}
		return nil
	})
	t.Run("a scrape is clean", r.scrapeIsClean)
	t.Run("a scrape has what is documented", r.scrapeIsDocumented)
	t.Run("the numbers agree with ls", func(t *testing.T) { r.numbersAgree(t, ask) })
}

func (r *rig) scrape(t *testing.T, at string) (text string) {
	t.Helper()
	wait.Within(t, limit(), at+" is scraped", func() (err error) {
		text, err = get(t, client(r.guest), "http://"+at+"/metrics")
		return err
	})
	return text
}

func (r *rig) scrapes(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for name, at := range map[string]string{"agent": agentMetrics, "host": hostMetrics} {
		out[name] = r.scrape(t, at)
	}
	return out
}

func (r *rig) scrapeIsClean(t *testing.T) {
	for name, text := range r.scrapes(t) {
		if out, err := command(t, strings.NewReader(text), tool(t, "promtool"), "check", "metrics"); err != nil || out != "" {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
		// No label may come from the guest's activity, such as a port or an address.
		for line := range strings.Lines(text) {
			if regexp.MustCompile(`^fairlead_.*["=](127\.0\.0\.1|0\.0\.0\.0|80\d\d|90\d\d)`).MatchString(line) {
				t.Errorf("%s names a port or an address: %s", name, line)
			}
		}
	}
}

func (r *rig) scrapeIsDocumented(t *testing.T) {
	b, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(fairlead_\\w+)` \\| (\\w+)").FindAllStringSubmatch(string(b), -1) {
		documented[m[1]+" "+m[2]] = true
	}
	// One that has the other sink that counts.
	other := newRig(t, "--sink", "listener").start()
	// Some have a series only once something has happened.
	wait.Within(t, limit(), "what is documented is exported, and nothing else", func() error {
		seen := map[string]bool{}
		for _, text := range append(slices.Collect(maps.Values(r.scrapes(t))), other.scrape(t, agentMetrics)) {
			for _, m := range regexp.MustCompile(`(?m)^# TYPE (fairlead_\w+) (\w+)`).FindAllStringSubmatch(text, -1) {
				seen[m[1]+" "+m[2]] = true
			}
		}
		var missing, extra []string
		for family := range documented {
			if !seen[family] {
				missing = append(missing, family)
			}
		}
		for family := range seen {
			if !documented[family] {
				extra = append(extra, family)
			}
		}
		if len(missing)+len(extra) > 0 {
			return fmt.Errorf("documented and not exported: %q; exported and not documented: %q", missing, extra)
		}
		return nil
	})
}

func (r *rig) numbersAgree(t *testing.T, ask func(string) ([]sample, error)) {
	wait.Within(t, limit(), "fairlead_publications{state=conflict} is that of ls", func() error {
		l, err := r.client().List(t.Context())
		if err != nil {
			return err
		}
		want := 0
		for _, p := range l.Publications {
			if p.State.String() == "conflict" {
				want++
			}
		}
		got, err := ask(`fairlead_publications{state="conflict"}`)
		if err != nil {
			return err
		}
		if want == 0 {
			return errors.New("ls shows no conflict")
		}
		if len(got) != 1 || got[0].Value[1] != fmt.Sprint(want) {
			return fmt.Errorf("%v, ls has %d", got, want)
		}
		return nil
	})
}
