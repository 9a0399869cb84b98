// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package observe

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// What a person sees in the table.
const (
	rowOf   = `[...document.querySelectorAll('#ports tbody tr[data-key]')].find((tr) => tr.querySelector('.port b').textContent === '%s')`
	rowText = `(` + rowOf + `?.innerText ?? '').replace(/\s+/g, ' ').trim()`
	portsIn = `[...document.querySelectorAll('#ports tbody tr:not([data-mark="gone"]) .port b')].map((b) => b.textContent).join(' ')`
	live    = `document.getElementById('connection').dataset.state`
)

// page opens the agent's page and waits until it shows the table.
func (r *rig) page(c *chromium, t *testing.T, width, height int) *tab {
	t.Helper()
	p := c.open(t, r.pageURL(), width, height)
	p.wait("the page is live", live, "live")
	p.wait("the table is there", `document.getElementById('empty').hidden`, true)
	return p
}

func TestPage(t *testing.T) {
	rules := filepath.Join(t.TempDir(), "rules.yaml")
	text := "rules:\n  - {name: 'no-<b>debug</b>', match: {ports: 9229}, action: deny}\n"
	if err := os.WriteFile(rules, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, "--rules-file", rules).start()
	for _, at := range []string{"0.0.0.0:8080", "127.0.0.1:5432", "[::1]:6379", "127.0.0.1:9229", "127.0.0.1:8100"} {
		if at == "127.0.0.1:8100" { // taken on the host: a conflict
			l, err := r.outside.Listen("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
		}
		r.listen(at)
	}
	udp, err := r.guest.ListenPacket("udp", "0.0.0.0:8125")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = udp.Close() })
	r.named("postgres", "127.0.0.1:5433")
	c := newChromium(t, r.guest)

	t.Run("shows ports with state, host address, owner and age", func(t *testing.T) {
		p := r.page(c, t, 1280, 800)
		p.wait("all ports", portsIn, "5432 5433 6379 8080 8100 8125 9229")
		for port, want := range map[string]string{
			"8080": `tcp active 127\.0\.0\.1:8080 .*process .*\*:8080 socket \d+ (s|min)`,
			"5433": `tcp active 127\.0\.0\.1:5433 process postgres `,
			"6379": `active \[::1\]:6379`,
			"8125": `udp active 127\.0\.0\.1:8125`,
			"8100": `conflict 127\.0\.0\.1:8100`,
			"9229": `denied`,
		} {
			wait.Within(t, limit(), "row of "+port, func() error {
				got, err := p.try(fmt.Sprintf(rowText, port))
				if err != nil {
					return err
				}
				if !regexp.MustCompile(want).MatchString(fmt.Sprint(got)) {
					return fmt.Errorf("%q, want %q", got, want)
				}
				return nil
			})
		}
		p.wait("all sources", `[...document.querySelectorAll('#sources b')].map((b) => b.textContent).join(' ')`, "containerd demand docker kube nat podman socket users")
		p.wait("its host", `document.querySelector('#peers li')?.dataset.state`, "live")
		p.wait("what there is not", `document.querySelector('#sources .source').dataset.state`, "absent")
		p.noConsole()
		p.shoot("table")
	})

	t.Run("follows a port that appears and vanishes, without a reload", func(t *testing.T) {
		p := r.page(c, t, 1280, 800)
		p.eval(`window.same = true`)
		l := r.listen("127.0.0.1:3000")
		p.wait("it appears", fmt.Sprintf(rowText+`.includes('active')`, "3000"), true)
		p.wait("the chart has it", `document.querySelectorAll('#latency circle').length > 0`, true)
		_ = l.Close()
		p.wait("it is gone", fmt.Sprintf(`(%s) === undefined`, fmt.Sprintf(rowOf, "3000")), true)
		if p.eval(`window.same`) != true {
			t.Error("the page was loaded again")
		}
		p.noConsole()
	})

	t.Run("finds ports by what is typed and by filter", func(t *testing.T) {
		p := r.page(c, t, 1280, 800)
		p.key("/")
		p.wait("the search has the keys", `document.activeElement.id`, "search")
		p.write("postgres")
		p.wait("by owner", portsIn, "5433")
		p.wait("the count", `document.getElementById('count').textContent`, "1 of 7")
		p.key("Escape")
		p.wait("all again", portsIn, "5432 5433 6379 8080 8100 8125 9229")
		p.write("postgres tcp") // the search still has the keys
		p.wait("by several words", portsIn, "5433")
		p.key("Escape")
		p.click(`[data-filter="state:active"]`)
		p.wait("without those that are active", portsIn, "8100 9229")
		p.click(`[data-filter="state:active"]`)
		p.click(`[data-filter="protocol:tcp"]`)
		p.wait("UDP alone", portsIn, "8125")
		p.click(`[data-filter="protocol:tcp"]`)
		p.click(`#search`)
		p.write("no such thing")
		p.wait("it says so", `document.getElementById('empty').innerText.startsWith('Nothing matches.') && !document.getElementById('empty').hidden`, true)
		p.click(`#empty button`)
		p.wait("all again", portsIn, "5432 5433 6379 8080 8100 8125 9229")
		p.click(`th[data-sort="port"] button`)
		p.wait("the other way round", portsIn, "9229 8125 8100 8080 6379 5433 5432")
		p.noConsole()
	})

	t.Run("explains a port, by keyboard alone", func(t *testing.T) {
		p := r.page(c, t, 1280, 800)
		p.wait("all ports", portsIn, "5432 5433 6379 8080 8100 8125 9229")
		for range 5 { // the fifth is the conflict
			p.key("j")
		}
		p.wait("it is selected", `document.querySelector('tr[aria-current] .port b').textContent`, "8100")
		p.key("Enter")
		p.wait("the detail is there", `document.querySelector('#detail h2').textContent`, "8100tcp")
		p.wait("it says why", `/taken|in use|holds|held/.test(document.querySelector('#detail .why').innerText)`, true)
		p.wait("in the words of explain", `/8100/.test(document.querySelector('#detail .summary')?.textContent)`, true)
		p.wait("with the next step", `document.querySelector('#detail .next') !== null`, true)
		p.wait("and each step", `document.querySelectorAll('#detail .steps li').length >= 3`, true)
		p.shoot("detail")
		p.key("k")
		p.wait("it goes along", `document.querySelector('#detail h2').textContent`, "8080tcp")
		p.key("Escape")
		p.wait("it closes", `document.getElementById('detail').hidden`, true)
		p.wait("and gives back the keys", `document.activeElement.querySelector('.port b').textContent`, "8080")
		p.key("?")
		p.wait("the keys are listed", `document.getElementById('help').open`, true)
		p.key("Escape")
		p.wait("and closed", `document.getElementById('help').open`, false)
		p.noConsole()
	})

	t.Run("shows names of the guest as text", func(t *testing.T) {
		p := r.page(c, t, 1280, 800)
		p.eval(`window.opened = false; window.alert = () => { window.opened = true; }`)
		markup := "<img src=x id=e" // 15 bytes are a process's name
		turned := "a\u202egpj.exe"
		r.named(markup, "127.0.0.1:7001")
		r.named(turned, "127.0.0.1:7002")
		p.wait("markup is text", fmt.Sprintf(rowText+`.includes('<img src=x id=e')`, "7001"), true)
		p.wait("what turns the writing is shown", fmt.Sprintf(rowText+`.includes('a\\u{202e}gpj.exe')`, "7002"), true)
		for _, port := range []string{"7001", "9229"} { // an owner; a rule's name
			p.eval(fmt.Sprintf(rowOf+`.click()`, port))
			p.wait("the detail", `document.querySelector('#detail h2').textContent`, port+"tcp")
			p.wait("is text too", `/<img src=x id=e|<b>debug/.test(document.getElementById('detail').innerText)`, true)
		}
		p.shoot("hostile")
		if n := p.eval(`document.querySelectorAll('#e, main img, main b b, td script, #detail .why b b').length`); n != 0.0 {
			t.Errorf("%v elements came from names", n)
		}
		if p.eval(`window.opened`) != false {
			t.Error("a name ran as script")
		}
		// The browser itself refuses markup made from text.
		if _, err := p.try(`document.body.innerHTML = 'x'`); err == nil {
			t.Error("markup can be made from text")
		}
		p.noConsole("TrustedHTML")
	})

	t.Run("is light or dark, as the system or as chosen", func(t *testing.T) {
		p := r.page(c, t, 1280, 800)
		ground := `getComputedStyle(document.body).backgroundColor`
		p.prefer("dark")
		p.wait("dark as the system", ground, "rgb(20, 24, 28)")
		p.wait("rows are there", portsIn+`.includes('8080')`, true)
		p.click(`[data-key*="|8080"]`)
		p.wait("the detail", `document.querySelectorAll('#detail .steps li').length >= 3`, true)
		p.shoot("dark")
		p.key("Escape")
		p.click("#theme") // light
		p.wait("light by choice", ground, "rgb(247, 248, 249)")
		p.key("t") // dark
		p.wait("dark by choice", ground, "rgb(20, 24, 28)")
		p.prefer("light")
		p.do("Page.reload", nil)
		p.wait("the choice is kept", live, "live")
		p.wait("dark by choice", ground, "rgb(20, 24, 28)")
		p.key("t")
		p.wait("as the system again", ground, "rgb(247, 248, 249)")
		p.noConsole()
	})

	t.Run("fits a window of 400 pixels", func(t *testing.T) {
		p := r.page(c, t, 400, 800)
		p.wait("rows are there", portsIn+`.includes('8080')`, true)
		fits := `Math.max(document.documentElement.scrollWidth, ...[...document.querySelectorAll(
			'header, header *, section, figure, .source, .chip, input, .list, tbody tr, tbody td, #detail *')].map((e) => e.getBoundingClientRect().right))`
		p.wait("nothing reaches beyond", `(`+fits+`) <= 400`, true)
		for _, part := range []string{".port", ".state", ".host", ".owner", ".age"} {
			if p.eval(fmt.Sprintf(rowOf+`.querySelector('%s').getBoundingClientRect().width > 0`, "8080", part)) != true {
				t.Errorf("%s is not to be seen", part)
			}
		}
		p.shoot("narrow")
		p.click(`[data-key*="|8100"]`)
		p.wait("the detail takes the window", `document.getElementById('detail').getBoundingClientRect().width`, 400)
		p.wait("nothing of the detail reaches beyond", `(`+fits+`) <= 400`, true)
		p.shoot("narrow-detail")
		p.click(`#detail .close`)
		p.wait("it closes", `document.getElementById('detail').hidden`, true)
		p.noConsole()
	})

	t.Run("asks for the token, and takes it", func(t *testing.T) {
		base, token, _ := strings.Cut(r.pageURL(), "/#token=")
		p := c.open(t, base+"/", 1280, 800)
		p.wait("it asks", `document.getElementById('login').open`, true)
		p.wait("for a token", `document.querySelector('#login h2').innerText + document.getElementById('wrong').hidden`, "Token neededtrue")
		p.wait("nothing is shown", portsIn, "")
		p.click("#token")
		p.write("wrong-wrong-wrong-wrong-wrong")
		p.key("Enter")
		p.wait("it asks again", `document.getElementById('login').open && document.getElementById('token').value === ''`, true)
		p.wait("as this one is wrong", `document.querySelector('#login h2').innerText + document.getElementById('wrong').hidden`, "Wrong tokenfalse")
		p.click("#token")
		p.write(base + "/#token=" + token)
		p.key("Enter")
		p.wait("it is live", live, "live")
		p.noConsole("401")
	})

	t.Run("keeps the token out of the address", func(t *testing.T) {
		p := r.page(c, t, 1280, 800)
		if at := fmt.Sprint(p.eval(`location.href + JSON.stringify(history.state)`)); strings.Contains(at, "token") {
			t.Errorf("the address is %s", at)
		}
		if kept := fmt.Sprint(p.eval(`JSON.stringify(localStorage) + document.cookie`)); strings.Contains(kept, "token") {
			t.Errorf("kept for other tabs: %s", kept)
		}
		p.noConsole()
	})

	t.Run("a page of another port cannot read it", func(t *testing.T) {
		l := r.listen("127.0.0.1:4000") // an echo: it answers a request with the request
		defer l.Close()
		p := c.open(t, "about:blank", 800, 600)
		got := p.eval(fmt.Sprintf(`fetch('http://%s/v1/ports').then((r) => 'read ' + r.status, (e) => 'refused')`, pageAddr))
		if got != "refused" {
			t.Errorf("another origin: %v", got)
		}
	})
}

// The relay of `fairlead web` outlives the agent, and so does its page.
func TestPageReconnects(t *testing.T) {
	r := newRig(t).start()
	r.listen("127.0.0.1:8080")
	web := start(t, r.guest, exec.Command(binary, "web", "--control", r.control, "--addr", "127.0.0.1:7421"))
	var url string
	wait.Within(t, limit(), "fairlead web says where", func() error {
		if url = regexp.MustCompile(`http://127\.0\.0\.1:7421/#token=\S+`).FindString(web.Output()); url == "" {
			return errors.New(web.Output())
		}
		return nil
	})
	c := newChromium(t, r.guest)
	p := c.open(t, url, 1280, 800)
	p.wait("the ports are there, the page's own among them", portsIn, "7421 8080")
	r.agent.Kill()
	p.wait("the loss is told", live, "lost")
	p.wait("what was known stays", portsIn, "7421 8080")
	r.startAgent()
	r.listen("127.0.0.1:8081")
	p.wait("it is live again", live, "live")
	p.wait("with what is there now", portsIn, "7421 8080 8081")
	p.noConsole("502", "ERR_INCOMPLETE_CHUNKED_ENCODING", "Failed to load resource")
}

// hostPage starts a host peer with one guest, and those of the flags, and returns the address
// of its page.
func (r *rig) hostPage(t *testing.T, guest string, flags ...string) string {
	t.Helper()
	control := filepath.Join(r.dir, "h", "s")
	r.host = start(t, r.outside, exec.Command(binary, append([]string{
		"host", "--connect", guest + "=unix://" + filepath.Join(r.dir, "l", "s"), "--control", control, "--web-addr", "127.0.0.1:7422",
	}, flags...)...))
	host := status.NewClient(control)
	var url string
	wait.Within(t, limit(), "the page is there", func() (err error) {
		if url, err = host.WebURL(t.Context()); err == nil && url == "" {
			err = errors.New("no address")
		}
		return err
	})
	return url
}

// A refused host is named, with the reason, on its own page and on that of the agent.
func TestPageShowsRefusal(t *testing.T) {
	token := func(letter string) string {
		path := filepath.Join(t.TempDir(), letter)
		if err := os.WriteFile(path, []byte(strings.Repeat(letter, 32)), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	r := newRig(t, "--link-token", token("a"))
	r.startAgent()
	host := r.hostPage(t, "dev", "--link-token", token("b"))
	const said = `/refused.*the tokens of agent and host differ/.test(document.querySelector('#peers li[data-state="stale"]')?.innerText)`
	const next = `document.querySelector('#peers li')?.title.includes('or neither of them')`
	for _, page := range []struct {
		name, url string
		from      *netns.Space
	}{{"the agent's", r.pageURL(), r.guest}, {"the host's", host, r.outside}} {
		p := newChromium(t, page.from).open(t, page.url, 1280, 800)
		p.wait(page.name+" names the refusal", said, true)
		p.wait(page.name+" says what to do", next, true)
		p.noConsole()
	}
}

// The page of a host names its guests as they are named in the configuration, and can hide
// the ports of one.
func TestPageNamesGuests(t *testing.T) {
	r := newRig(t)
	r.startAgent()
	r.listen("127.0.0.1:8080")
	p := newChromium(t, r.outside).open(t, r.hostPage(t, "dev", "--connect", "other=unix://"+filepath.Join(r.dir, "none")), 1280, 800)
	p.wait("the guest's name", `document.querySelector('#peers li b')?.textContent`, "dev")
	const chip = `[...document.querySelectorAll('[data-filter^="guest:"]')].find((b) => b.innerText.startsWith('dev'))`
	p.wait("a filter for it", `(`+chip+`)?.innerText.replace(/\s/g, '')`, "dev1")
	p.eval(`(` + chip + `).click()`)
	p.wait("its ports are hidden", portsIn, "")
	p.eval(`(` + chip + `).click()`)
	p.wait("it in the row", `document.querySelector('#ports tbody td.guest')?.textContent.includes('dev')`, true)
	p.eval(fmt.Sprintf(rowOf+`.click()`, "8080"))
	p.wait("it in the detail", `document.querySelector('#detail .facts')?.textContent.includes('Guestdev')`, true)
	p.noConsole()
}

// The page of a host shows on request what its guests do not publish, and why: a port that a
// rule denies, one that is withheld, and a NAT rule that is not understood.
func TestPageShowsWhatGuestsDoNotPublish(t *testing.T) {
	rules := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(rules, []byte("rules:\n  - {name: no-debug, match: {ports: 9229}, action: deny}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	other := `{"Id":"` + strings.Repeat("a", 64) + `","Name":"/other","Names":["/other"],"State":{"Status":"running","Running":true},"HostConfig":{},"Config":{},
		"NetworkSettings":{"Networks":{},"Ports":{}}}`
	r := newRig(t, "--rules-file", rules, "--source", "socket,nat,docker", "--docker-host", enginetest.Docker(t, other),
		"--forwards-file", filepath.Join(t.TempDir(), "forwards.json"))
	r.startAgent()
	r.listen("127.0.0.1:8080")
	r.listen("127.0.0.1:9229")
	err := r.guest.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return unix.Bind(fd, &unix.SockaddrInet4{Port: 9999})
	})
	if err != nil {
		t.Fatal(err)
	}
	nft := exec.Command("nft", "-f", "-")
	nft.Stdin = strings.NewReader("table ip t { chain c { type nat hook prerouting priority -100; meta mark 7 tcp dport 7070 dnat to 10.0.0.2:80; }; }")
	if err := errors.Join(r.guest.Start(nft), nft.Wait()); err != nil {
		t.Fatal(err)
	}
	p := newChromium(t, r.outside).open(t, r.hostPage(t, "dev"), 1280, 800)
	const chip = `[data-filter="published:no"]`
	p.wait("what is published", portsIn, "8080")
	p.wait("the others are counted", `document.querySelector('`+chip+` b')?.textContent`, "2")
	p.wait("the rule is counted", `document.querySelector('#peers li')?.innerText.includes('1 warning')`, true)
	p.wait("and named", `/meta mark/.test(document.querySelector('#peers li').title)`, true)
	p.eval(fmt.Sprintf(rowOf+`.click()`, "8080"))
	p.wait("it is not tested", `document.querySelector('#detail .summary')?.textContent.includes('8080/tcp is open, not tested,')`, true)
	p.click(`#detail .why button`)
	p.wait("the guest dials", `document.querySelector('#detail .summary')?.textContent.includes('8080/tcp is reachable')`, true)
	p.key("Escape")
	p.click(chip)
	p.wait("the others", portsIn, "8080 9229 9999")
	for port, why := range map[string]string{"9229": "denied by rule 1 (no-debug)", "9999": "bound, not listening"} {
		p.wait("why "+port+" is not published", fmt.Sprintf(rowText+`.includes('%s')`, port, why), true)
		p.eval(fmt.Sprintf(rowOf+`.click()`, port))
		p.wait("the detail of "+port, `document.querySelector('#detail h2').textContent`, port+"tcp")
		p.wait("with the reason", fmt.Sprintf(`document.querySelector('#detail .summary')?.textContent.includes('%s')`, why), true)
		p.wait("and the next step", `document.querySelector('#detail .next') !== null`, true)
		p.wait("nothing to test", `document.querySelector('#detail .why button') === null`, true)
	}
	p.shoot("unpublished")
	p.key("Escape")
	double := func(chip string) {
		p.eval(`document.querySelector('` + chip + `').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))`)
	}
	double(chip)
	p.wait("these alone", portsIn, "9229 9999")
	double(`[data-filter="state:active"]`)
	p.wait("those that are open alone", portsIn, "8080")
	p.click(chip)
	p.wait("both", portsIn, "8080 9229 9999")
	p.noConsole()
}

// A phone's window shows the whole header, and scrolls in one direction alone, also when the
// guest or the connection is lost, and whatever the guest is called.
func TestPageFitsNarrowWindowWhenLost(t *testing.T) {
	const fits = `JSON.stringify([...document.querySelectorAll('html, header, header *, .strip, .strip *, .chip, input, .list, tbody tr, tbody td')].filter((e) =>
		e.getBoundingClientRect().right > innerWidth || ['HTML', 'HEADER'].includes(e.tagName) && e.scrollWidth > e.clientWidth ||
		e.id === 'connection' && e.scrollWidth > e.clientWidth).map((e) => [e.tagName, e.className, e.getBoundingClientRect().right, e.scrollWidth]))`
	r := newRig(t)
	r.startAgent()
	r.listen("127.0.0.1:8080")
	p := newChromium(t, r.outside).open(t, r.hostPage(t, strings.Repeat("long", 15)), 390, 800)
	p.wait("the port is there", portsIn, "8080")
	p.wait("connected, nothing reaches beyond", fits, "[]")
	r.agent.Kill()
	p.wait("the guest is lost", `document.querySelector('#peers li')?.dataset.state`, "stale")
	p.wait("with a lost guest nothing reaches beyond", fits, "[]")
	p.shoot("narrow-guest-lost")
	r.host.Kill()
	p.wait("the connection is lost", live, "lost")
	p.wait("with a lost connection nothing reaches beyond", fits, "[]")
	p.shoot("narrow-lost")
}

// The screenshot in docs/web.md, artefact "document", of a typical guest.
func TestPageScreenshot(t *testing.T) {
	rules := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(rules, []byte("rules:\n  - {name: no-debug, match: {ports: 9229}, action: deny}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, "--rules-file", rules).start()
	taken, err := r.outside.Listen("tcp", "127.0.0.1:5432")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = taken.Close() })
	for _, s := range [][2]string{
		{"nginx", "0.0.0.0:8080"}, {"postgres", "127.0.0.1:5432"}, {"redis-server", "127.0.0.1:6379"}, {"node", "0.0.0.0:3000"},
		{"node", "127.0.0.1:9229"}, {"grafana", "0.0.0.0:3001"}, {"minio", "0.0.0.0:9000"}, {"prometheus", "[::]:9090"},
	} {
		r.named(s[0], s[1])
	}
	c := newChromium(t, r.guest)
	p := r.page(c, t, 1240, 720)
	p.wait("all ports", portsIn, "3000 3001 5432 6379 8080 9000 9090 9229")
	for i := range 20 { // for the charts
		l := r.listen(fmt.Sprintf("127.0.0.1:%d", 20000+i))
		p.wait("it appears", fmt.Sprintf(rowText+`.includes('active')`, fmt.Sprint(20000+i)), true)
		conn, err := r.outside.Dial("tcp", "127.0.0.1:8080")
		if err == nil {
			_, _ = conn.Write(make([]byte, 4000*(i%7)))
		}
		time.Sleep(300 * time.Millisecond)
		if err == nil {
			_ = conn.Close()
		}
		_ = l.Close()
	}
	p.wait("all are gone again", `document.querySelectorAll('#ports tbody tr').length`, 8)
	p.wait("the chart has them", `document.querySelectorAll('#latency circle').length >= 20`, true)
	p.eval(fmt.Sprintf(rowOf+`.click()`, "5432"))
	p.wait("explained", `document.querySelector('#detail .next') !== null`, true)
	p.noConsole()
	p.shoot("document")
}

func TestWebPrintsAgentURL(t *testing.T) {
	r := newRig(t).start()
	ctx, cancel := context.WithTimeout(t.Context(), limit())
	defer cancel()
	out, err := exec.CommandContext(ctx, binary, "web", "--control", r.control).Output()
	if err != nil || strings.TrimSpace(string(out)) != r.pageURL() {
		t.Errorf("%q, %v, want %s", out, err, r.pageURL())
	}
	if l, err := r.client().List(t.Context()); err != nil || len(l.Publications) != 0 {
		t.Errorf("the page's own port is published: %+v, %v", l.Publications, err)
	}
}

// A hidden page receives nothing: its stream is closed.
func TestHiddenPageClosesStream(t *testing.T) {
	r := newRig(t).start()
	r.listen("127.0.0.1:8080")
	c := newChromium(t, r.guest)
	p := r.page(c, t, 800, 600)
	p.eval(`Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true}); window.away = true; document.dispatchEvent(new Event('visibilitychange'))`)
	p.wait("it pauses", live, "away")
	p.eval(`window.away = false; document.dispatchEvent(new Event('visibilitychange'))`)
	p.wait("it goes on", live, "live")
	p.noConsole()
}

func TestPageRendersManyPortsInChunks(t *testing.T) {
	const many = 2000
	r := newRig(t).start()
	for i := range many {
		l, err := r.guest.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20000+i))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
	}
	c := newChromium(t, r.guest)
	p := r.page(c, t, 1280, 800)
	p.wait("all are counted", `document.getElementById('count').textContent`, fmt.Sprintf("%d ports", many))
	rows := `document.querySelectorAll('#ports tbody tr').length`
	p.wait("some are shown", rows, 300)
	p.click("#more button")
	p.wait("more are shown", rows, 600)
	p.key("/")
	p.write("21999")
	p.wait("all are searched", portsIn, "21999")
	p.noConsole()
}
