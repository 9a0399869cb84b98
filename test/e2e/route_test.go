// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/names"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// named is a container of Compose with a web server at port 80 and a TLS server at 443.
const named = `{"Id":"4f1e3c0a9b7d2c6e8f5a1b3d7c9e0f2a4b6c8d0e1f3a5b7c9d1e3f5a7b9c0d2e","Name":"/web","Names":["/web"],
"State":{"Status":"running","Running":true},"HostConfig":{},"Config":{"Labels":%[1]s},"Labels":%[1]s,
"NetworkSettings":{"Networks":{},"Ports":{"80/tcp":[{"HostIp":"0.0.0.0","HostPort":"80"}],"443/tcp":[{"HostIp":"0.0.0.0","HostPort":"443"}]}}}`

// answerByName answers in three ways: it echoes a body, sends events, or echoes what follows an upgrade.
func answerByName(w http.ResponseWriter, q *http.Request) {
	switch {
	case q.Header.Get("Upgrade") != "":
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
		_, _ = io.Copy(conn, rw)
	case q.URL.Path == "/events":
		_, _ = io.WriteString(w, "data: first\n\n")
		_ = http.NewResponseController(w).Flush()
		<-q.Context().Done()
	default:
		w.Header().Set("X-Host", q.Host)
		_, _ = io.Copy(w, q.Body)
	}
}

// The host leads browsers and TLS clients to a container by its name, though it has the
// container's ports for itself.
func TestNamesLeadToContainers(t *testing.T) {
	labels := `{"com.docker.compose.project":"shop","com.docker.compose.service":"front"}`
	r := newRig(t, "--source", "docker", "--docker-host", enginetest.Docker(t, fmt.Sprintf(named, labels)))
	r.hostFlags = append(r.hostFlags, "--names", "127.0.0.1:80", "--names-tls", "127.0.0.1:443")
	web := &http.Server{Handler: http.HandlerFunc(answerByName)}
	plain := r.guest.listen(t, "tcp4", "0.0.0.0:80")
	go func() { _ = web.Serve(plain) }()
	t.Cleanup(func() { _ = web.Close() })
	secure := httptest.NewUnstartedServer(http.HandlerFunc(answerByName))
	_ = secure.Listener.Close()
	secure.Listener = r.guest.listen(t, "tcp4", "0.0.0.0:443")
	secure.StartTLS()
	t.Cleanup(secure.Close)
	r.start()
	for _, n := range []string{"80", "443"} {
		r.wantState("tcp 0.0.0.0:"+n, port.Conflict.String())
		if _, p := r.state("tcp 0.0.0.0:" + n); !strings.Contains(p.Reason, "127.0.0.1:"+n+" is held by this host's names (--names") {
			t.Errorf("port %s: reason %q", n, p.Reason)
		}
	}
	r.servesNames()
	tr := &http.Transport{
		DialContext: func(_ context.Context, _, at string) (net.Conn, error) {
			return r.outside.Dial("tcp", "127.0.0.1"+at[strings.LastIndexByte(at, ':'):])
		},
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}
	t.Cleanup(tr.CloseIdleConnections)
	c := &http.Client{Transport: tr, Timeout: wait.Limit()}
	body := bytes.Repeat([]byte("abcdefgh"), 1<<18)
	for _, url := range []string{"http://web.localhost/", "http://front.shop.localhost/", "http://80.front.localhost/", "https://web.localhost/", "https://443.web.localhost/"} {
		resp, err := c.Post(url, "text/plain", bytes.NewReader(body))
		if err != nil {
			t.Fatalf("%s: %v", url, err)
		}
		got, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || !bytes.Equal(got, body) || !strings.Contains(url, "//"+resp.Header.Get("X-Host")+"/") {
			t.Errorf("%s: %d, %d bytes, %v, Host %q", url, resp.StatusCode, len(got), err, resp.Header.Get("X-Host"))
		}
	}
	resp, err := c.Get("http://web.localhost/events")
	if err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(resp.Body).ReadString('\n'); line != "data: first\n" {
		t.Errorf("the first event: %q, %v", line, err)
	}
	_ = resp.Body.Close()
	r.echoesByName(t, "web.localhost")
	for url, code := range map[string]int{"http://evil.example/": 421, "http://none.localhost/": 404, "http://localhost/": 200, "http://localhost/names.json": 200} {
		resp, err := c.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		if resp.Body.Close(); resp.StatusCode != code {
			t.Errorf("%s: %d, want %d", url, resp.StatusCode, code)
		}
	}
	out, _, _ := fairlead(t, "ls", "--names", "--control", r.hostCtl, "-o", "json")
	if e := decode[names.Report](t, out).Names; len(e) != 1 || e[0].Names[0] != "web.localhost" || len(e[0].Ports) != 2 {
		t.Errorf("ls --names -o json: %s", out)
	}
	l, err := listAt(r.hostCtl)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Publications {
		if want := fmt.Sprintf("%d.web.localhost", p.Port); len(p.Names) == 0 || p.Names[0] != want {
			t.Errorf("names of %s: %q, want %s first", p.Key, p.Names, want)
		}
	}
	if out, _, _ := fairlead(t, "doctor", "--host", "--control", r.hostCtl); !strings.Contains(out, "names over http at 127.0.0.1:80 are served") {
		t.Errorf("doctor says %s", out)
	}
}

// servesNames waits until the host leads to the container.
func (r *rig) servesNames() {
	r.t.Helper()
	r.eventually("names are served", func() error {
		out, _, _ := fairlead(r.t, "ls", "--names", "--control", r.hostCtl)
		if strings.Contains(out, "not served") || !strings.Contains(out, "web.localhost") {
			return errors.New(out)
		}
		return nil
	})
}

// An upgraded connection ends through the link as one to the port does: each direction for
// itself, and a reset of one side, or the end of the host peer, by a reset of the other.
func TestNamesPassTheEndsOfUpgrades(t *testing.T) {
	r := newRig(t, "--source", "docker", "--docker-host", enginetest.Docker(t, fmt.Sprintf(named, "{}")))
	r.hostFlags = append(r.hostFlags, "--names", "127.0.0.1:80")
	upgraded := make(chan *net.TCPConn, 1)
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		upgraded <- conn.(*net.TCPConn)
	})}
	plain := r.guest.listen(t, "tcp4", "0.0.0.0:80")
	go func() { _ = web.Serve(plain) }()
	t.Cleanup(func() { _ = web.Close() })
	r.start()
	r.servesNames()
	for what, end := range map[string]func(from, to *net.TCPConn){
		"its end": func(from, to *net.TCPConn) {
			_, _ = io.WriteString(from, "there")
			_ = from.CloseWrite()
			if b, err := io.ReadAll(to); err != nil || string(b) != "there" {
				t.Errorf("there: %q, %v", b, err)
			}
			back := bytes.Repeat([]byte("back"), 1<<18)
			go func() {
				_, _ = to.Write(back)
				_ = to.CloseWrite()
			}()
			if b, err := io.ReadAll(from); err != nil || !bytes.Equal(b, back) {
				t.Errorf("back: %d bytes, %v", len(b), err)
			}
		},
		"its reset": func(from, to *net.TCPConn) {
			half(t, from, to)
			_ = from.SetLinger(0)
			_ = from.Close()
			wantReset(t, to)
		},
	} {
		for _, by := range []string{"client", "server"} {
			t.Run(by+", "+what, func(t *testing.T) {
				client, server := r.upgrade(t, upgraded)
				if by == "client" {
					end(client, server)
				} else {
					end(server, client)
				}
			})
		}
	}
	client, server := r.upgrade(t, upgraded)
	half(t, client, server)
	half(t, server, client)
	r.host.Kill()
	wantReset(t, client)
	wantReset(t, server)
}

// upgrade upgrades a connection by name, and returns both ends.
func (r *rig) upgrade(t *testing.T, upgraded <-chan *net.TCPConn) (client, server *net.TCPConn) {
	t.Helper()
	conn, err := r.outside.Dial("tcp", "127.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	client = conn.(*net.TCPConn)
	t.Cleanup(func() { _ = client.Close() })
	_ = client.SetDeadline(time.Now().Add(wait.Limit()))
	_, _ = io.WriteString(client, "GET / HTTP/1.1\r\nHost: web.localhost\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(client), nil) // nothing follows yet
	if err != nil {
		t.Fatal(err)
	}
	if _ = resp.Body.Close(); resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("upgrade: %+v", resp)
	}
	server = <-upgraded
	t.Cleanup(func() { _ = server.Close() })
	_ = server.SetDeadline(time.Now().Add(wait.Limit()))
	return client, server
}

// half sends a part of something.
func half(t *testing.T, from, to *net.TCPConn) {
	t.Helper()
	b := make([]byte, len("half"))
	_, _ = io.WriteString(from, "half")
	if _, err := io.ReadFull(to, b); err != nil || string(b) != "half" {
		t.Errorf("%q, %v", b, err)
	}
}

// wantReset wants nothing more than a reset.
func wantReset(t *testing.T, conn *net.TCPConn) {
	t.Helper()
	if b, err := io.ReadAll(conn); len(b) > 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("then %q, %v, want a reset", b, err)
	}
}

// echoesByName upgrades a connection and wants what it sends back.
func (r *rig) echoesByName(t *testing.T, name string) {
	t.Helper()
	conn, err := r.outside.Dial("tcp", "127.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, _ = fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", name)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("upgrade: %+v", resp)
	}
	for range 3 {
		_, _ = conn.Write([]byte("ping\n"))
		if line, err := in.ReadString('\n'); line != "ping\n" {
			t.Fatalf("echo %q, %v", line, err)
		}
	}
}
