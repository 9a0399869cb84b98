// SPDX-License-Identifier: Apache-2.0

package docker

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
)

// maxBody bounds one reply of the engine. A list of 10,000 containers is 20 MB.
const maxBody = 64 << 20

// conn is one connection to an engine. The types of the client refuse a whole
// list for one number that is no port, so replies are kept as they came and
// decoded here, container by container.
type conn struct {
	*client.Client
	transport *http.Transport
	timeout   time.Duration
	raw       *http.Client // for what the client has no call for
	url       string       // of the engine
}

// dial makes a client for host and agrees on an API version. Close it. An error by which
// nobody listens there is an [engine.ErrRefused].
func (s *Source) dial(ctx context.Context, host string) (_ *conn, err error) {
	t := &http.Transport{MaxIdleConns: 4, IdleConnTimeout: 30 * time.Second, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10}
	dialer := engine.NewDialer(ctx)
	t.DialContext = dialer.DialContext
	scheme, addr, _ := strings.Cut(host, "://")
	kept := func() *http.Client {
		return &http.Client{Transport: keeper{t, s.o.MaxBody}, CheckRedirect: client.CheckRedirect}
	}
	opts := []client.Opt{client.WithHost(host), client.WithHTTPClient(kept())}
	c := &conn{transport: t, timeout: s.o.Timeout, raw: kept(), url: "http://" + addr}
	if scheme == "unix" {
		c.url = "http://engine.localhost"
		var access engine.Access = engine.Path(addr)
		if s.o.Access != nil {
			access = s.o.Access
		}
		if err := access.Check(); err != nil {
			return nil, err // the client's own words are long
		}
		t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return access.Dial(ctx, dialer.DialContext)
		}
	}
	if s.o.CertPath != "" && scheme == "tcp" {
		if t.TLSClientConfig, err = tlsConfig(s.o.CertPath); err != nil {
			return nil, err
		}
		opts = append(opts, client.WithScheme("https"))
		c.url = "https://" + addr
	}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if c.Client, err = client.New(opts...); err != nil {
		return nil, fmt.Errorf("client for %s: %w", host, err)
	}
	pctx, cancel := c.limit(ctx)
	defer cancel()
	if _, err := c.Ping(pctx, client.PingOptions{NegotiateAPIVersion: true}); err != nil {
		err = fmt.Errorf("agree on an API version: %w", withCause(pctx, err))
		if dialer.Refused() {
			err = engine.Refused(err)
		}
		return nil, err
	}
	return c, nil
}

func (c *conn) close() { c.transport.CloseIdleConnections() }

func (c *conn) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, c.timeout, fmt.Errorf("no answer within %v", c.timeout))
}

// withCause replaces a bare "context deadline exceeded" by its reason.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

func tlsConfig(dir string) (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"))
	if err != nil {
		return nil, fmt.Errorf("client certificate: %w", err)
	}
	if leaf := cert.Leaf; leaf != nil && time.Now().After(leaf.NotAfter) {
		return nil, fmt.Errorf("client certificate %s expired on %s", filepath.Join(dir, "cert.pem"), leaf.NotAfter.Format(time.DateOnly))
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err != nil {
		return nil, fmt.Errorf("certificate authority: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("certificate authority %s: no certificate in it", filepath.Join(dir, "ca.pem"))
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: pool, MinVersion: tls.VersionTLS12}, nil
}

// reply holds the body of one successful answer.
type reply struct {
	path string // the request's path ends with it
	body []byte
	err  error
}

type replyKey struct{}

// keeper is a transport that moves the body of an answer to the reply in the
// request's context, if there is one, and leaves JSON null in its place.
type keeper struct {
	*http.Transport

	max int64 // bytes of one answer
}

func (k keeper) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := k.Transport.RoundTrip(req)
	if err == nil && resp.StatusCode >= http.StatusBadRequest {
		resp.Body = failure{io.LimitReader(resp.Body, maxFailure), resp.Body}
	}
	if err == nil && strings.HasSuffix(req.URL.Path, "/events") {
		resp.Body = &lines{ReadCloser: resp.Body, max: k.max / 16}
	}
	r, ok := req.Context().Value(replyKey{}).(*reply)
	if err != nil || !ok || resp.StatusCode != http.StatusOK || !strings.HasSuffix(req.URL.Path, r.path) {
		return resp, err
	}
	defer func() { _ = resp.Body.Close() }()
	r.body, r.err = io.ReadAll(io.LimitReader(resp.Body, k.max+1))
	if r.err == nil && int64(len(r.body)) > k.max {
		r.err = fmt.Errorf("the answer is larger than %d MiB", k.max>>20)
	}
	resp.Body = io.NopCloser(strings.NewReader("null"))
	resp.ContentLength = 4
	return resp, nil
}

// maxFailure bounds what an engine says of a failure, which becomes an error's text.
const maxFailure = 4 << 10

// failure is the body of an answer that is an error.
type failure struct {
	io.Reader
	io.Closer
}

// lines bounds each line of a body that has no end.
type lines struct {
	io.ReadCloser

	max  int64 // bytes of one line
	size int64 // of the line so far
}

func (l *lines) Read(b []byte) (int, error) {
	n, err := l.ReadCloser.Read(b)
	if i := bytes.LastIndexByte(b[:n], '\n'); i >= 0 {
		l.size = int64(n - 1 - i)
	} else {
		l.size += int64(n)
	}
	if l.size > l.max {
		return 0, fmt.Errorf("an event is larger than %d KiB", l.max>>10)
	}
	return n, err
}

// get runs one call of the client and returns the body of its answer.
func (c *conn) get(ctx context.Context, path string, call func(context.Context) error) ([]byte, error) {
	r := &reply{path: path}
	ctx, cancel := c.limit(context.WithValue(ctx, replyKey{}, r))
	defer cancel()
	err := call(ctx)
	if r.err != nil || r.body == nil && err != nil {
		return nil, withCause(ctx, errors.Join(r.err, err))
	}
	return r.body, nil
}

// engineInfo is what matters of the engine as a whole.
type engineInfo struct {
	ServerVersion   string
	SecurityOptions []string
	Swarm           struct {
		LocalNodeState   string
		ControlAvailable bool
	}
}

func (i engineInfo) rootless() bool {
	return slices.ContainsFunc(i.SecurityOptions, func(s string) bool { return strings.Contains(s, "name=rootless") })
}

func (c *conn) info(ctx context.Context) (engineInfo, error) {
	body, err := c.get(ctx, "/info", func(ctx context.Context) error {
		_, err := c.Info(ctx, client.InfoOptions{})
		return err
	})
	var i engineInfo
	if err == nil {
		err = json.Unmarshal(body, &i)
	}
	if err != nil {
		return i, fmt.Errorf("info: %w", err)
	}
	return i, nil
}

// kind returns the program of the engine, "" if it is not known.
func (c *conn) kind(ctx context.Context) Kind {
	body, err := c.get(ctx, "/version", func(ctx context.Context) error {
		_, err := c.ServerVersion(ctx, client.ServerVersionOptions{})
		return err
	})
	var v struct{ Components []struct{ Name string } }
	if err != nil || json.Unmarshal(body, &v) != nil || len(v.Components) == 0 {
		return ""
	}
	switch v.Components[0].Name {
	case "Engine":
		return Docker
	case "Podman Engine":
		return Podman
	}
	return ""
}

// network is an endpoint of a container in a network.
type network struct {
	IPAddress         string
	GlobalIPv6Address string
}

// summary is one entry of the list of containers.
type summary struct {
	ID      string `json:"Id"`
	Names   []string
	Labels  map[string]string
	State   string
	Ports   []summaryPort
	Network struct{ Networks map[string]network } `json:"NetworkSettings"`
}

type summaryPort struct {
	IP          string
	PrivatePort int64
	PublicPort  int64
	Type        string
}

// listed is a summary, or why there is none.
type listed struct {
	summary
	err error
}

// list returns the containers that the options select. An entry that cannot be read is an
// entry with an error.
func (c *conn) list(ctx context.Context, o client.ContainerListOptions) ([]listed, error) {
	body, err := c.get(ctx, "/containers/json", func(ctx context.Context) error {
		_, err := c.ContainerList(ctx, o)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	return decodeList(body)
}

func decodeList(body []byte) ([]listed, error) {
	var raw []json.RawMessage
	if err := json.Unmarshal(body, &raw); err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	out := make([]listed, 0, len(raw))
	for _, r := range raw {
		var l listed
		if l.err = json.Unmarshal(r, &l.summary); l.err != nil {
			var only struct {
				ID    string `json:"Id"`
				Names []string
			}
			// As much of the name as there is, for the warning.
			_ = json.Unmarshal(r, &only)
			l.summary = summary{ID: only.ID, Names: only.Names}
		}
		if l.ID == "" {
			l.err = errors.Join(l.err, errors.New("an entry of the list has no id"))
		}
		out = append(out, l)
	}
	return out, nil
}

// details is what inspecting one container returns.
type details struct {
	ID    string `json:"Id"`
	Name  string
	State struct {
		Running, Paused bool
		Pid             int
	}
	Config     struct{ Labels map[string]string }
	HostConfig struct{ NetworkMode string }
	Network    struct {
		Ports    map[string][]struct{ HostIP, HostPort string }
		Networks map[string]network
	} `json:"NetworkSettings"`
	// Of Podman, by its own API.
	Pod     string
	IsInfra bool
}

func (c *conn) inspect(ctx context.Context, id string) (details, error) {
	body, err := c.get(ctx, "/containers/"+id+"/json", func(ctx context.Context) error {
		_, err := c.ContainerInspect(ctx, id, client.ContainerInspectOptions{})
		return err
	})
	if err != nil {
		return details{}, fmt.Errorf("inspect: %w", err)
	}
	var d details
	if err := json.NewDecoder(bytes.NewReader(body)).Decode(&d); err != nil {
		return details{}, fmt.Errorf("inspect: %w", err)
	}
	return d, nil
}

// inspectPodman is inspect by Podman's own API, which tells of pods. The container that has
// the network of a pod has the pod's name and labels.
func (c *conn) inspectPodman(ctx context.Context, id string) (d details, err error) {
	if err := c.libpod(ctx, "/containers/"+id+"/json", &d); err != nil {
		return details{}, fmt.Errorf("inspect: %w", err)
	}
	d.State.Running = d.State.Running || d.State.Paused
	if !d.IsInfra || d.Pod == "" {
		return d, nil
	}
	var pod struct {
		Name   string
		Labels map[string]string
	}
	if err := c.libpod(ctx, "/pods/"+d.Pod+"/json", &pod); err != nil {
		return details{}, fmt.Errorf("inspect pod: %w", err)
	}
	d.Name = cmp.Or(pod.Name, d.Name)
	labels := make(map[string]string, len(d.Config.Labels)+len(pod.Labels))
	maps.Copy(labels, d.Config.Labels)
	maps.Copy(labels, pod.Labels)
	d.Config.Labels = labels
	return d, nil
}

// libpodAPI is Podman's own API. Podman 3 to 6 know this version of it.
const libpodAPI = "/v4.0.0/libpod"

// libpod asks Podman, and decodes the answer into v.
func (c *conn) libpod(ctx context.Context, path string, v any) error {
	body, err := c.get(ctx, path, func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+libpodAPI+path, nil)
		if err != nil {
			return err
		}
		resp, err := c.raw.Do(req)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode == http.StatusOK {
			return nil
		}
		text, _ := io.ReadAll(resp.Body)
		// A proxy that knows Docker's API alone finds nothing at this path, whatever is there.
		var podmans struct{ Response int }
		if json.Unmarshal(text, &podmans) == nil && podmans.Response == http.StatusNotFound {
			return cerrdefs.ErrNotFound
		}
		return fmt.Errorf("%s: %s", resp.Status, bytes.TrimSpace(text))
	})
	if err != nil {
		return err
	}
	return json.Unmarshal(body, v)
}

// addresses returns the container's addresses in the order of its networks' names.
func addresses(networks map[string]network) []netip.Addr {
	names := make([]string, 0, len(networks))
	for n := range networks {
		names = append(names, n)
	}
	slices.Sort(names)
	var out []netip.Addr
	for _, n := range names {
		for _, s := range []string{networks[n].IPAddress, networks[n].GlobalIPv6Address} {
			if a, err := netip.ParseAddr(s); err == nil {
				out = append(out, a.Unmap())
			}
		}
	}
	return out
}
